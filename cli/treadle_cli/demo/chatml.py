"""Read the chat template and tokenizer of a model that uses ChatML (SmolLM2, Qwen), with tokenizers
alone."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from treadle.environments import Chat, Message

from treadle_cli.exits import UsageProblem

START, END = "<|im_start|>", "<|im_end|>"


def read_chat(model_path: str) -> Chat:
    """Return the chat of a model's folder, from its tokenizer.json. Raises UsageProblem where there
    is none, or no ChatML."""
    path = Path(model_path) / "tokenizer.json"
    if not path.is_file():
        raise UsageProblem(
            f"{path} does not exist: the demo needs the model as a local folder with its "
            "tokenizer.json"
        )
    return chat_of(Tokenizer.from_file(str(path)))


def chat_of(tokenizer: Tokenizer) -> Chat:
    """Return the chat of a tokenizer. Raises UsageProblem for one without the tokens of ChatML."""
    end_id = tokenizer.token_to_id(END)
    if end_id is None or tokenizer.token_to_id(START) is None:
        raise UsageProblem(
            f"the demo needs ChatML, and the tokenizer has no {START} and {END}: choose another "
            "--model"
        )
    return Chat(
        _render,
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        stop_token_ids=(end_id,),
    )


def _render(messages: Sequence[Message], _tools: object, begins: bool) -> str:
    said = "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)
    return f"{said}{START}assistant\n" if begins else said
