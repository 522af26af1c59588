"""Packaging. `pip install .` installs coat_dist, megatron_patches and the launch programs."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# One tested minor range each; docs/support.md lists the pairs that were run.
REQUIRES = [
    "torch>=2.11,<2.14",
    "triton>=3.6,<3.9; platform_system == 'Linux'",
    "pydantic>=2.10,<3",
    "numpy>=1.26,<3",
    "packaging>=23",
]
DEEPSPEED = ["deepspeed>=0.19.8,<0.20", "hjson>=3"]
HF = ["transformers>=4.56,<6", "accelerate>=1,<2", "peft>=0.21,<1"]
MEGATRON = ["megatron-core>=0.14,<0.17"]
TRAIN = [
    *DEEPSPEED,
    *MEGATRON,
    "huggingface_hub>=0.23,<3",
    "matplotlib>=3.9,<4",
    "psutil>=5.9,<8",
    "pyarrow>=17",
    "pyyaml>=6,<7",
    "safetensors>=0.8,<1",
    "sentencepiece>=0.2,<0.3",
    "tensorboard>=2.17,<3",
    "tokenizers>=0.20,<1",
    "tqdm>=4.66,<5",
]
EXTRAS = {
    "deepspeed": DEEPSPEED,
    "hf": HF,
    "megatron": MEGATRON,
    "train": TRAIN,  # what launch/ needs
    "all": [*HF, *TRAIN],
    "dev": [
        *HF,
        *TRAIN,
        "pytest>=8,<10",
        "pytest-xdist>=3.5,<4",
        "hypothesis>=6.100,<7",
        "ruff>=0.6,<1",
        "mypy>=1.11,<3",
    ],
    "trl": [*DEEPSPEED, *HF, "trl>=1.16,<1.17", "datasets>=5.2,<5.3"],
}
PROGRAMS = (
    "convert-hf",
    "planner",
    "plot",
    "prepare-data",
    "pretrain",
    "scaling",
    "to-universal",
)


def version() -> str:
    """The one version number, read as text: importing the package would need torch while it is
    being built.
    """
    text = Path(__file__).with_name("coat_dist").joinpath("__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


setup(
    name="coat-dist",
    version=version(),
    license="Apache-2.0",
    license_files=["LICENSE"],
    description="FP8 optimizer states and activations for DeepSpeed and Megatron-core training",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The coat_dist developers",
    project_urls={"Paper": "https://arxiv.org/abs/2410.19313"},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.13",
    # `configs` stays at the top of the project, and is installed inside `launch`, which looks for
    # it in both places.
    packages=[
        *find_packages(include=["coat_dist*", "megatron_patches*", "launch*"]),
        *("launch.configs.models", "launch.configs.deepspeed"),
    ],
    package_dir={"launch.configs": "configs"},
    package_data={
        "coat_dist": ["py.typed", "children/*.py"],
        "megatron_patches": ["py.typed"],
        "launch.configs.models": ["*.json"],
        "launch.configs.deepspeed": ["*.json"],
    },
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": [f"coat-{name} = launch.scripts:main" for name in PROGRAMS]},
)
