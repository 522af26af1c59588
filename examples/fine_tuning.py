"""TRL's SFTTrainer with FP8 moments and FP8 layers: a small Llama learns to call a calculator.

    python examples/fine_tuning.py
    deepspeed --num_gpus 2 examples/fine_tuning.py
    python examples/fine_tuning.py --lora 32 --steps 800

Needs TRL: pip install '/path/to/coat_dist[trl]'. Start it from the root of this repository:
examples/trainer.json, which names the optimizer and has the "coat" block, is read from there.

The model begins with random weights. It learns from generated conversations, in which an assistant
answers questions about arithmetic by calls of a tool; the loss is of the assistant's tokens only.
transformers then loads the saved model, which is asked questions that it has not seen, with the
calculator run for it. Two ranks take three minutes on two CPU cores.

With --lora the linears stay as they are, in FP8 codes, and adapters of PEFT learn, together with
embeddings and head. Their base is loaded as codes, as a large one would be; the adapters are merged
into a base that is loaded in full.
"""

import argparse
import itertools
import json
import operator
import os
import random
import re
import tempfile

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

# From here on, deepspeed.initialize honours the "coat" block, and the Trainer calls it.
import coat_dist

WORDS = {"plus": "+", "minus": "-", "times": "*"}
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ASKED = ("What is {}?", "How much is {}?", "Please calculate {}.", "Tell me {}.")
# The text between {% generation %} and {% endgeneration %} is what `assistant_only_loss` trains.
TEMPLATE = """\
{%- if tools %}{{ '<|system|>' + (tools | tojson) + '<|end|>' }}{% endif -%}
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- (message.content or '') + '<|end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""


def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: two whole numbers and +, - or * between them
    """
    found = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    return str(OPERATIONS[found[2]](int(found[1]), int(found[3]))) if found else "error"


TOOLS = [transformers.utils.get_json_schema(calculator)]


def conversation(rng: random.Random) -> list[dict]:
    """A question, the calls that answer it and their results, and the answer. Every other question
    has two steps.
    """
    result = str(rng.randint(10, 99))
    asked, turns = result, []
    for joint in ("", ", then")[: 1 + (rng.random() < 1 / 2)]:
        word = rng.choice(list(WORDS))
        number = rng.randint(2, 9) if word == "times" else rng.randint(10, 99)
        asked += f"{joint} {word} {number}"
        arguments = {"expression": f"{result} {WORDS[word]} {number}"}
        call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
        result = calculator(**arguments)
        turns += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": result},
        ]
    question = {"role": "user", "content": rng.choice(ASKED).format(asked)}
    return [question, *turns, {"role": "assistant", "content": f"The result is {result}."}]


def make_tokenizer(chats: list[list[dict]]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE in which a digit is a token, trained on the conversations themselves."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers
    whole = split.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = split.Sequence([split.Digits(individual_digits=True), whole])
    library.decoder = tokenizers.decoders.ByteLevel()
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=roles,
        chat_template=TEMPLATE,
        padding_side="left",
    )
    texts = tokenizer.apply_chat_template(chats, tools=TOOLS, tokenize=False)
    pieces = (piece for text in texts for piece in re.split(r"<\|\w+\|>", text) if piece)
    return tokenizer.train_new_from_iterator(
        pieces, vocab_size=1024, initial_alphabet=split.ByteLevel.alphabet(), show_progress=False
    )


@torch.no_grad()
def answer(model, tokenizer, chats: list[list[dict]]) -> None:
    """Continue conversations to their answers, with the calculator run for the model."""
    for _ in range(4):
        waiting = [chat for chat in chats if chat[-1]["role"] != "assistant"]
        if not waiting:
            break
        given = tokenizer.apply_chat_template(
            waiting,
            tools=TOOLS,
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        ).to(model.device)
        made = model.generate(**given, max_new_tokens=48, do_sample=False)
        for chat, ids in zip(waiting, made[:, given["input_ids"].shape[1] :], strict=True):
            said = tokenizer.decode(ids, skip_special_tokens=True)
            found = re.fullmatch(r"<tool_call>(.*)</tool_call>", said)
            try:
                function = json.loads(found[1])
                result = calculator(**function["arguments"])
            except (TypeError, ValueError, KeyError):  # an answer, or not a well-formed call
                chat.append({"role": "assistant", "content": said})
                continue
            chat += [
                {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
                {"role": "tool", "name": "calculator", "content": result},
            ]


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500, help="optimizer steps")
parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank")
parser.add_argument("--questions", type=int, default=150, help="how many are asked")
parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # from the deepspeed launcher
args = parser.parse_args()

generated = (conversation(random.Random(seed)) for seed in itertools.count())
unique = {chat[0]["content"]: chat for chat in itertools.islice(generated, 40000)}
chats = list(unique.values())
held_out, trained = chats[: args.questions], chats[args.questions :]

tokenizer = make_tokenizer(trained[:1000])
transformers.set_seed(0)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
)
datasets.disable_progress_bars()
output = tempfile.TemporaryDirectory()
with open("examples/trainer.json") as file:
    config = json.load(file)
adapters = None
if args.lora:
    config["coat"]["activation"]["frozen_weights"] = "fp8"
    base = f"{output.name}/base"
    model.save_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=coat_dist.FrozenWeightsConfig(config)
    )
    adapters = peft.LoraConfig(
        r=args.lora,
        lora_alpha=2 * args.lora,
        target_modules="all-linear",
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
trainer = trl.SFTTrainer(
    model,
    trl.SFTConfig(
        output.name,
        deepspeed=config,
        assistant_only_loss=True,
        max_length=256,
        gradient_checkpointing=False,  # activations are in 8 bits
        per_device_train_batch_size=64 // int(os.environ.get("WORLD_SIZE", 1)),
        max_steps=args.steps,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 15,
        adam_beta2=0.95,
        logging_steps=max(args.steps // 6, 1),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=datasets.Dataset.from_list(
        [{"messages": chat, "tools": json.dumps(TOOLS)} for chat in trained]
    ),
    processing_class=tokenizer,
    peft_config=adapters,
)
trainer.train()
trainer.save_model()

if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.4f}")
    print(trainer.model.coat_patch_report)  # which layers run in FP8, which stay BF16, and why
    whole = base if args.lora else output.name
    saved = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    if args.lora:
        saved = peft.PeftModel.from_pretrained(saved, output.name).merge_and_unload()
    asked = [chat[:1] for chat in held_out]
    answer(saved, transformers.AutoTokenizer.from_pretrained(output.name), asked)
    for message in asked[-1]:
        print(f"    {message['role']}: {message.get('content') or message['tool_calls']}")
    right = sum(chat[-1] == known[-1] for chat, known in zip(asked, held_out, strict=True))
    print(f"{right} of {len(asked)} answers are right", flush=True)
