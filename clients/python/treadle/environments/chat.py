"""Make token ids from messages with the model's own chat template, and never tokenize again what
the policy sampled.

A template renders a whole conversation. A trajectory needs what comes after the tokens that it has,
so Chat renders a short conversation whose assistant writes MARK, and takes the text after MARK: the
end of the assistant's turn, the new messages and the beginning of the next turn. This text alone is
tokenized. A token that ends the turn and that the policy has sampled itself is left out. Templates
that drop earlier reasoning do so for messages before MARK, which are not taken: the trajectory
keeps what was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.environments.episode import Message, ToolSchema, user

MARK = "TREADLE-MARK-7f3a"  # letters that no template changes; no policy reads it

# (messages, tools, whether the assistant's turn begins at the end) -> text
Render = Callable[[Sequence[Message], Sequence[ToolSchema], bool], str]


class Chat:
    """The chat template and the tokenizer of one model.

    render: a conversation as text, special tokens included. encode: ids of such text, without
    adding special tokens. decode: text of ids, without special tokens. stop_token_ids: the ids that
    end an assistant's turn; they are added to those of each Sampling. Raises ValueError for a
    template that cannot continue a conversation.
    """

    def __init__(
        self,
        render: Render,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._render, self._encode, self.decode = render, encode, decode
        self.stop_token_ids = tuple(stop_token_ids)

    @classmethod
    def of(cls, tokenizer: Any, **template: Any) -> Chat:
        """Make a Chat from a tokenizer of `transformers`. template: variables of its chat template,
        e.g. enable_thinking=False."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat_template: take that of an instruct model, or set one"
            )

        def render(messages: Sequence[Message], tools: Sequence[ToolSchema], begins: bool) -> str:
            text: str = tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=begins,
                tokenize=False,
                **template,
            )
            return text

        def encode(text: str) -> list[int]:
            whole = text.encode(
                errors="replace"
            ).decode()  # half a character, as JSON can name it, is `?`
            return list(tokenizer.encode(whole, add_special_tokens=False))

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))

        chat = cls(render, encode, decode)
        end_id, eos_id = chat._after((user(""),), ())[0], tokenizer.eos_token_id
        ends = {end_id} & {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        chat.stop_token_ids = tuple(sorted(ends | ({eos_id} if eos_id is not None else set())))
        return chat

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Return a whole prompt: the messages, and the beginning of the assistant's turn."""
        return list(self._encode(self._render(messages, tools, True)))

    def head(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Return the tokens that all conversations have in common which begin with these messages
        and continue with a user's."""
        return list(self._encode(self._head_text(messages, tools)))

    def complete(
        self,
        messages: Sequence[Message],
        first: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        lead: str = "",
    ) -> list[int]:
        """Return the tokens after head(messages) where the conversation continues with `first`, up
        to the first words of the assistant's turn. first: messages, of which the first one is the
        user's."""
        head, text = (
            self._head_text(messages, tools),
            self._render([*messages, *first], tools, True),
        )
        if not text.startswith(head):
            raise ValueError(
                "the chat template changes earlier messages where others follow: begin with a "
                "user's"
            )
        return list(self._encode(text[len(head) :] + lead))

    def go_on(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        lead: str = "",
    ) -> list[int]:
        """Return the tokens after those that the policy sampled: the end of its turn, unless it has
        sampled that too, the messages, and the beginning of its next turn."""
        ids = self._after(messages, tools, lead)
        return ids[1:] if sampled and ids and sampled[-1] == ids[0] else ids

    def words(self, text: str) -> list[int]:
        """Return the ids of plain text."""
        return list(self._encode(text))

    def _after(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], lead: str = ""
    ) -> list[int]:
        before = [user("-"), {"role": "assistant", "content": MARK}]
        return list(
            self._encode(self._behind_mark(self._render([*before, *messages], tools, True)) + lead)
        )

    def _head_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        text = self._render([*messages, user(MARK)], tools, True)
        return text[: len(text) - len(self._behind_mark(text)) - len(MARK)]

    def _behind_mark(self, text: str) -> str:
        if text.count(MARK) != 1:
            raise ValueError(
                "the chat template does not show each message once: give a Chat with a render of "
                "your own"
            )
        return text.partition(MARK)[2]
