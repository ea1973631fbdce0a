"""Chat templates: what stands between the tokens that a policy samples is what the whole template
would have there."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from treadle.environments import Chat, Message, user

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }} {% endfor "
    "%}<|im_end|>\n{% endif %}{%- for message in messages %}{%- if message.role == 'tool' "
    "%}<|im_start|>user\n<tool_response>{{ message.content }}</tool_response><|im_end|>\n{% else "
    "%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if quiet %}<think></think>{% endif "
    "%}{% endif %}"
)
# As Qwen 3: what an assistant thought is left out once a user has spoken after it.
THINKING = CHATML.replace(
    "{{ message.role }}\n{{ message.content }}",
    "{{ message.role }}\n{{ message.content.split('</think>')[-1] if not loop.last else "
    "message.content }}",
)
# As Llama 3: the first token stands in the template, and contents are stripped.
HEADERS = (
    "<|begin|>{%- for message in messages %}<|start|>{{ message.role }}<|end|>\n\n{{ "
    "message.content | trim }}<|eot|>"
    "{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|end|>", "<|eot|>", "<|eos|>")
SYSTEM: Message = {"role": "system", "content": "Be brief."}


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|eos|>", chat_template=template
    )


def whole(tokenizer: Any, messages: Sequence[Message], **template: Any) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=False, **template
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("template", [CHATML, THINKING, HEADERS])
@pytest.mark.parametrize("ends_itself", [True, False])
def test_a_conversation_in_pieces_is_the_conversation(template: str, ends_itself: bool) -> None:
    """Two turns, where the policy samples the token that ends its first one, or is cut before
    it."""
    tokenizer = tokenizer_with(template)
    chat = Chat.of(tokenizer)
    prompt = [SYSTEM, user("What is 6 times 7?")]
    said = tokenizer.encode("42, I think", add_special_tokens=False)
    end = tokenizer.encode(
        "<|eot|>" if template == HEADERS else "<|im_end|>", add_special_tokens=False
    )
    sampled = said + end if ends_itself else said
    more = [user("Sure?")]
    pieces = [*chat.begin(prompt), *sampled, *chat.go_on(sampled, more)]
    assert pieces == whole(
        tokenizer, [*prompt, {"role": "assistant", "content": "42, I think"}, *more]
    )
    assert set(end) < set(chat.stop_token_ids)
    assert tokenizer.eos_token_id in chat.stop_token_ids


def test_what_was_thought_stays_as_it_was_sampled() -> None:
    """The template would leave it out of the next prompt, and tokens that were sampled must not
    change."""
    tokenizer = tokenizer_with(THINKING)
    chat = Chat.of(tokenizer)
    sampled = tokenizer.encode("<think>6·7</think>42<|im_end|>", add_special_tokens=False)
    follows = chat.go_on(sampled, [user("Sure?")])
    assert (
        tokenizer.decode(follows) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [CHATML, HEADERS])
@pytest.mark.parametrize("first", ["hello", "\n\n indented"])
def test_what_is_known_before_an_episode_and_what_is_not_make_one_prompt(
    template: str, first: str
) -> None:
    tokenizer = tokenizer_with(template)
    chat = Chat.of(tokenizer)
    pieces = [*chat.head([SYSTEM]), *chat.complete([SYSTEM], [user(first)], lead="I say")]
    text = f"{tokenizer.decode(whole(tokenizer, [SYSTEM, user(first)]))}I say"
    assert tokenizer.decode(pieces) == text


def test_results_of_tools_and_variables_of_the_template_are_rendered() -> None:
    tokenizer = tokenizer_with(CHATML)
    chat = Chat.of(tokenizer, quiet=True)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert "look" in tokenizer.decode(chat.begin([user("hi")], tools))
    follows = str(tokenizer.decode(chat.go_on([], [{"role": "tool", "content": "seen"}], tools)))
    assert "<tool_response>seen</tool_response>" in follows
    assert follows.endswith("assistant\n<think></think>")
    assert "look" not in follows


def test_a_sampled_text_is_read_without_special_tokens() -> None:
    tokenizer = tokenizer_with(CHATML)
    assert Chat.of(tokenizer).decode(tokenizer.encode("42<|im_end|>")) == "42"


def test_half_a_character_is_read_as_a_question_mark() -> None:
    """A policy can write one in JSON, and a tool can say it again; no tokenizer takes it."""
    tokenizer = tokenizer_with(CHATML)
    follows = Chat.of(tokenizer).go_on([], [{"role": "tool", "content": json.loads('"a\\ud800b"')}])
    assert "<tool_response>a?b</tool_response>" in str(tokenizer.decode(follows))


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="chat_template"):
        Chat.of(tokenizer_with(None))


def test_a_template_that_leaves_messages_out_is_refused() -> None:
    with pytest.raises(ValueError, match="render of your own"):
        Chat.of(tokenizer_with("{{ messages[-1].content }}"))
