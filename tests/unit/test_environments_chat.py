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
# As Gemma 4: a result is shown behind its call, in the same turn, and a result without a call is
# left out. The policy ends its call with the token with which the result begins.
BEHIND_CALLS = (
    "{%- for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{%- for message in messages"
    " %}{%- if message.role == 'user' %}<|start|>user {{ message.content }}<|eot|>\n{% endif %}"
    "{%- if message.role == 'assistant' %}<|start|>model {{ message.content }}{%- for call in "
    "message.tool_calls or [] %}<|call|>{{ call.function.name }}{%- for key, value in "
    "call.function.arguments.items() %} {{ key }}:{{ value }}{% endfor %}<|end|>{% endfor %}"
    "{%- if message.tool_calls %}{%- for other in messages[loop.index:] if other.role == 'tool' "
    "%}<|result|>{{ other.name }}:{{ other.content }}<|end|>{%- else %}<|result|>{%- endfor %}"
    "{%- else %}<|eot|>\n{% endif %}{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|start|>model {% endif %}"
)
# As gpt-oss: one call at most is shown, and a result without a call raises; a call, the end of the
# last reply and that of an earlier one have three tokens.
ONE_CALL = (
    "{%- for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{%- set seen = "
    "namespace(call=none) %}{%- for message in messages %}{%- if message.tool_calls %}{%- set "
    "seen.call = message.tool_calls[0].function %}<|start|>assistant to={{ seen.call.name }} {{ "
    "seen.call.arguments | tojson }}<|call|>{%- elif message.role == 'tool' %}{%- if not seen.call "
    "%}{{ raise_exception('no call before') }}{% endif %}<|start|>{{ seen.call.name }} {{ "
    "message.content | tojson }}<|end|>{%- else %}<|start|>{{ message.role }} {{ message.content }}"
    "{{ '<|eos|>' if loop.last and message.role == 'assistant' else '<|end|>' }}{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# As DeepSeek V3: arguments are JSON, and a token ends all calls of a reply.
ARGUMENTS_AS_JSON = (
    "{%- for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{%- for message in messages"
    " %}{%- if message.tool_calls %}<|start|>assistant\n{% for call in message.tool_calls %}"
    "{{ '<|call|>' + call.function.name + ' ' + call.function.arguments + '<|end|>' }}{%- endfor %}"
    "<|calls_end|><|eos|>{% else %}<|start|>{{ message.role }}\n{{ message.content }}<|eos|>"
    "{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As Phi 3: a result of a tool is left out.
WITHOUT_RESULTS = (
    "{%- for message in messages %}{%- if message.role != 'tool' %}<|start|>{{ message.role }}\n{{ "
    "message.content }}<|end|>\n{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|start|>"
    "assistant\n{% else %}<|eos|>{% endif %}"
)
# As Gemma 2.
WITHOUT_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{{ raise_exception('not supported') }}{%- endif %}"
)
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|end|>", "<|eot|>", "<|eos|>"),
    *("<|call|>", "<|calls_end|>", "<|result|>"),
)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {}}}
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


def called(*places: str) -> Message:
    calls = [
        {"id": f"call0000{index}", "function": {"name": "look", "arguments": {"at": place}}}
        for index, place in enumerate(places)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def results(*contents: str) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": f"call0000{index}", "name": "look", "content": content}
        for index, content in enumerate(contents)
    ]


@pytest.mark.parametrize(
    ("template", "ends"),
    [(BEHIND_CALLS, ["<|result|>"]), (ONE_CALL, ["<|call|>"]), (ARGUMENTS_AS_JSON, ["<|eos|>"])],
)
@pytest.mark.parametrize("ends_itself", [True, False])
@pytest.mark.parametrize("seen", [["a wall"], ["a wall", 'a "door"']])
def test_results_are_what_the_template_shows_behind_the_calls(
    template: str, ends: Sequence[str], ends_itself: bool, seen: Sequence[str]
) -> None:
    """The policy samples its calls as the template shows them, and the token that ends them or
    not."""
    tokenizer = tokenizer_with(template)
    chat = Chat.of(tokenizer)
    prompt, more = [user("What is there?")], results(*seen)
    calls = called(*["left", "right"][: 1 if template == ONE_CALL else len(seen)])
    if template == ARGUMENTS_AS_JSON:
        for call in calls["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    expected = str(tokenizer.decode(whole(tokenizer, [*prompt, calls, *more], tools=[LOOK])))
    begun = str(tokenizer.decode(chat.begin(prompt, [LOOK])))
    sampled, end, _ = expected.removeprefix(begun).partition(ends[0])
    ids = tokenizer.encode(sampled + (end if ends_itself else ""), add_special_tokens=False)
    follows = str(tokenizer.decode(chat.go_on(ids, more, [LOOK])))
    assert begun + str(tokenizer.decode(ids)) + follows == expected
    assert {*tokenizer.encode("".join(ends), add_special_tokens=False)} <= {*chat.stop_token_ids}


def test_each_kind_of_turn_ends_with_its_own_token() -> None:
    """The token behind an earlier reply is no end of a turn where the last reply has another
    one."""
    ends = {
        template: {
            str(tokenizer_with(template).decode([each]))
            for each in Chat.of(tokenizer_with(template)).stop_token_ids
        }
        for template in (BEHIND_CALLS, ONE_CALL, ARGUMENTS_AS_JSON, WITHOUT_RESULTS)
    }
    assert ends == {
        BEHIND_CALLS: {"<|eos|>", "<|eot|>", "<|result|>"},
        ONE_CALL: {"<|eos|>", "<|call|>"},
        ARGUMENTS_AS_JSON: {"<|eos|>"},
        WITHOUT_RESULTS: {"<|eos|>", "<|end|>"},
    }


def test_text_before_the_end_of_a_turn_is_not_added_to_what_was_sampled() -> None:
    """Nemotron's template writes a line break before the end of each turn."""
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>", "\n<|im_end|>"))
    chat = Chat.of(tokenizer)
    sampled = tokenizer.encode("42<|im_end|>", add_special_tokens=False)
    after_end, after_text = (
        str(tokenizer.decode(chat.go_on(ids, [user("Sure?")]))) for ids in (sampled, sampled[:-1])
    )
    assert after_end.startswith("\n<|im_start|>user")
    assert after_text == f"\n<|im_end|>{after_end}"


def test_a_kind_of_message_that_is_left_out_or_refused_is_named_at_the_start() -> None:
    results_left_out = Chat.of(tokenizer_with("look " + WITHOUT_RESULTS))
    assert results_left_out.begin([SYSTEM, user("hi")])
    for begin in (results_left_out.begin, results_left_out.head):
        with pytest.raises(ValueError, match="leaves out a tool message"):
            begin([user("hi")], [LOOK])
    with pytest.raises(ValueError, match="leaves out a tool message"):
        results_left_out.go_on([], results("a wall"))
    without_system = Chat.of(tokenizer_with(WITHOUT_SYSTEM + HEADERS))
    assert without_system.begin([user("hi")])
    for make, given in (
        (without_system.begin, ([SYSTEM, user("hi")],)),
        (without_system.head, ([SYSTEM],)),
        (without_system.complete, ([SYSTEM], [user("hi")])),
    ):
        with pytest.raises(ValueError, match=r"refuses these messages \(system, user\).*not supp"):
            make(*given)
    left_out = Chat.of(tokenizer_with(f"{{%- set messages = messages[-3:] %}}{CHATML}"))
    with pytest.raises(ValueError, match="leaves out a system message"):
        left_out.begin([SYSTEM, user("1"), {"role": "assistant", "content": "2"}, user("3")])


def test_tools_that_the_prompt_does_not_name_are_refused() -> None:
    chat = Chat.of(tokenizer_with(HEADERS))
    with pytest.raises(ValueError, match=r"does not show the tools \(look\)"):
        chat.begin([user("hi")], [LOOK])
    with pytest.raises(ValueError, match=r"does not show the tools \(look\)"):
        chat.complete([], [user("hi")], [LOOK])
    described = [{"role": "system", "content": "Call look(at)."}, user("hi")]
    assert chat.begin(described, [LOOK])


def test_calls_in_a_prompt_have_their_arguments_as_the_template_takes_them() -> None:
    as_json = called("left")
    as_json["tool_calls"][0]["function"]["arguments"] = '{"at": "left"}'
    for template, shown in (
        (BEHIND_CALLS, "<|call|>look at:left<|end|>"),
        (ARGUMENTS_AS_JSON, '<|call|>look {"at": "left"}<|end|>'),
        (ONE_CALL, 'to=look {"at": "left"}<|call|>'),
    ):
        tokenizer = tokenizer_with(template)
        for call in (called("left"), as_json):
            prompt = [user("What?"), call, *results("a wall"), user("And now?")]
            assert shown in str(tokenizer.decode(Chat.of(tokenizer).begin(prompt, [LOOK])))


def test_the_template_says_whether_a_reply_begins_within_reasoning() -> None:
    """DeepSeek R1 begins to think after a user, and not after a result."""
    thinking = f"{CHATML}{{%- if messages[-1].role != 'tool' %}}<think>\n{{% endif %}}"
    chat = Chat.of(tokenizer_with(thinking))
    prompt, result = [SYSTEM, user("<think>?")], results("</think>")
    assert chat.reply_opening(prompt) == "<think>\n"
    assert chat.reply_opening([user("?")], after_reply=True) == "<think>\n"
    assert chat.reply_opening(result, after_reply=True) == ""
    quiet = Chat.of(tokenizer_with(CHATML), quiet=True)
    assert quiet.reply_opening(prompt) == quiet.reply_opening(result, after_reply=True) == ""


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
