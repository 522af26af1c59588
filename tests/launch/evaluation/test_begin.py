"""``--bos``: what is put before every text, with each kind of tokenizer."""

import itertools
import json

import pytest

from coat_dist import CoatConfigError
from launch.data.tokenizer import load
from launch.evaluation.tokens import begin_ids


@pytest.mark.parametrize(
    "given, ids",
    [("<s>", [1]), ("1", [1]), ("eod", [2]), ("auto", []), ("none", []), ("</s>", [2])],
)
def test_of_sentencepiece(sentencepiece_file, given, ids):
    assert begin_ids(load(f"sentencepiece:{sentencepiece_file}"), given) == ids


def test_other_tokens_are_refused(sentencepiece_file):
    for spec, given in ((f"sentencepiece:{sentencepiece_file}", "<bos>"), ("bytes", "99999")):
        with pytest.raises(
            CoatConfigError, match=f"--bos: got '{given}', accepted: auto, none, eod, a token"
        ):
            begin_ids(load(spec), given)


NONE = object()


@pytest.mark.parametrize("template", [False, True], ids=["no template", "template"])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer"])
def test_auto_is_what_the_installed_transformers_does(tmp_path, template, kind):
    """Also where ``tokenizer.json`` and ``add_bos_token`` contradict each other."""
    transformers = pytest.importorskip("transformers")
    import tokenizers as tk

    library = tk.Tokenizer(tk.models.BPE({c: i for i, c in enumerate(["<s>", "</s>", *"abc"])}, []))
    library.add_special_tokens(["<s>", "</s>"])
    if template:
        library.post_processor = tk.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    library.save(str(tmp_path / "tokenizer.json"))
    compared = 0
    for wanted, named in itertools.product((NONE, True, False), (True, False)):
        config = {"tokenizer_class": kind, "eos_token": "</s>"}
        config |= {} if wanted is NONE else {"add_bos_token": wanted}
        config |= {"bos_token": "<s>"} if named else {}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        try:
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
        except Exception:
            continue
        whole, bare = theirs("a").input_ids, theirs("a", add_special_tokens=False).input_ids
        assert whole[len(whole) - len(bare) :] == bare
        mine = begin_ids(load(f"hf:{tmp_path / 'tokenizer.json'}", eod=1), "auto")
        assert mine == whole[: len(whole) - len(bare)], (config, template)
        compared += 1
    assert compared >= 3
