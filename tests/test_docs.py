"""Every page in Markdown: code that is part of an example, links that lead somewhere, files that
exist.
"""

import json
import re
from pathlib import Path

import pytest

from coat_dist.config import CoatConfig
from coat_dist.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
CHANGES = ROOT / "CHANGELOG.md"  # also names files of before
FOLDERS = [p for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith((".", "runs"))]
FILES = [str(p.relative_to(ROOT)) for folder in FOLDERS for p in folder.rglob("*")] + [
    p.name for p in ROOT.iterdir()
]
ELSEWHERE = {"ds_to_universal.py", "zero_to_fp32.py"}
"""Files that pages name and that are not of this repository: DeepSpeed's."""


def per_page(*pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(text, *languages):
    return [
        code
        for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)
        if language in languages
    ]


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(page):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def holders(code):
    """The examples that a piece of code stands in, word for word and in whole lines."""
    return [
        p.name
        for p in sorted((ROOT / "examples").iterdir())
        if p.is_file() and f"\n{code}" in f"\n{p.read_text()}"
    ]


def test_code_that_is_part_of_the_examples():
    found = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python", "json")
    (block,) = blocks((ROOT / "docs" / "hugging-face.md").read_text(encoding="utf-8"), "json")
    assert [holders(code) for code in (block, *found)] == [
        ["trainer.json"],
        ["trainer.py"],
        ["trainer.json"],
        ["deepspeed_any_model.py"],
        ["torch_loop.py"],
        ["megatron_deepspeed.py"],
    ]


def test_readme_links_every_example():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"](examples/{p.name})" in text for p in (ROOT / "examples").glob("*.py"))


def test_the_configuration_of_docs_config_is_accepted():
    (code,) = blocks((ROOT / "docs" / "config.md").read_text(encoding="utf-8"), "json")
    Settings.read(json.loads(code)).check()
    assert CoatConfig.from_deepspeed(json.loads(code)) == CoatConfig(), "nothing has to be set"


@per_page(*PAGES, CHANGES)
def test_links_lead_somewhere(page):
    text = re.sub(
        r"`[^`\n]*`",
        "",
        without_code(page.read_text(encoding="utf-8")).replace("[`", "[").replace("`]", "]"),
    )
    for words, target in re.findall(r"\[([^]]*)\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target
        assert not words.endswith(".md") or Path(words).name == other.name, (
            f"{words} leads to {target}"
        )


@per_page(*PAGES)
def test_files_that_are_named_exist(page):
    """Paths in backticks that end in .py or begin with a folder of this repository; short ones by
    their last parts. What stands before "of commit HASH" was there then.
    """
    folders = {folder.name for folder in FOLDERS}
    text = re.sub(
        r"`[\w./-]+`\s+of\s+commit\s+[0-9a-f]{7}\b",
        "",
        without_code(page.read_text(encoding="utf-8")),
    )
    for name in re.findall(r"`([\w./*{},-]+)`", text):
        path = name.rstrip("/")
        any_name = re.search(r"(^|[/_-])(NAME|PROGRAM|ROOM)([/_.-]|$)", path)  # stands for any file
        if (
            name in ELSEWHERE
            or any_name
            or not (path.split("/")[0] in folders or path.endswith(".py"))
        ):
            continue
        expression = re.escape(path).replace(r"\*", "[^/]*")
        expression = re.sub(r"\\\{(.*?)\\\}", lambda m: f"({m[1].replace(',', '|')})", expression)
        wanted = re.compile(rf"(.*/)?{expression}(/.*|\.py)?")
        assert any(wanted.fullmatch(file) for file in FILES), name
