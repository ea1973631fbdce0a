"""Measures how many tokens a verification of n-gram drafts yields, by replaying recorded samples,
without an engine.

Under exact verification a draft token is accepted if and only if it equals the token that was
sampled, so a recorded sample says what would have been accepted. Before each verification the
longest suffix of the sample so far, of at most MOST_SUFFIX tokens, is looked up in the sample
itself (its prompt, its own tokens and what its tools said) and in finished samples of the same
prompt; what followed its last occurrence, the sample's own before a sibling's, is the draft: a
chain, where SGLang's NGRAM verifies a tree.

Tokens are those of the plain pattern TOKEN, GPT's split into words, numbers and signs without the
merges inside them. Models' tokens are shorter than words, so a copied identifier counts as fewer
tokens here than there.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from treadle_sim.engine_model import Speculation

from treadle_bench.public_traces import SOURCES, PublicTraceError
from treadle_bench.summary import rounded

Tokens = npt.NDArray[np.int32]

TOKEN = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\w\s]+|_+|\s+")
TOKENIZER = "words, numbers of at most three digits and signs, each with the space before it"
# SGLang's NGRAM verifies 12 tokens by default, one of which is not a draft
DRAFT_TOKENS = (3, 7, 11)
MOST_SUFFIX = 12  # SGLang's `speculative_ngram_max_match_window_size`
# several samples a prompt, and one
REPEATED, SINGLE = ("tau_airline_gpt4o", "swebench_verified_mini_gemini3")
SINGLE_STRIDE = 25  # of `SINGLE` every so-many-th sample
PARTING = -1  # between two samples; no token
FIRST_TEXT = {REPEATED: "first_user", SINGLE: "prompt"}


class Sample:
    """A recorded trajectory as tokens. turns: where each generated text begins and ends."""

    def __init__(
        self, prompt: str, turns: Iterable[tuple[str, str]], vocabulary: dict[str, int]
    ) -> None:
        """turns: texts that were generated, and what the tool answered."""
        tokens = _encode(prompt, vocabulary)
        self.turns: list[tuple[int, int]] = []
        for generated, answer in turns:
            begin = len(tokens)
            tokens += _encode(generated, vocabulary)
            self.turns.append((begin, len(tokens)))
            tokens += _encode(answer, vocabulary)
        self.tokens: Tokens = np.array(tokens, np.int32)

    @property
    def gen_tokens(self) -> int:
        return sum(end - begin for begin, end in self.turns)


def _encode(text: str, vocabulary: dict[str, int]) -> list[int]:
    return [vocabulary.setdefault(piece, len(vocabulary)) for piece in TOKEN.findall(text)]


def measure_acceptance(data: Path) -> dict[str, Any]:
    """`tokens`: mean tokens that a verification yields, for each length of draft by finished
    siblings. `own_context`: without siblings, of the source that has one sample a prompt. Raises
    PublicTraceError, OSError."""
    by_prompt, counted = _read(REPEATED, data, 1)
    groups = list(by_prompt.values())
    fewest = min(len(group) for group in groups)
    single, _ = _read(SINGLE, data, SINGLE_STRIDE)
    alone = [(sample, ()) for group in single.values() for sample in group]
    return {
        "source": REPEATED,
        "samples": sum(len(group) for group in groups),
        "prompts": len(groups),
        "tokenizer": TOKENIZER,
        "tokens_to_counted": rounded(
            sum(sample.gen_tokens for group in groups for sample in group) / counted
        ),
        "siblings": list(range(fewest)),
        "tokens": {
            str(drafts): [
                rounded(yield_of(_with_siblings(groups, count), drafts)) for count in range(fewest)
            ]
            for drafts in DRAFT_TOKENS
        },
        "own_context": {
            "source": SINGLE,
            "samples": len(alone),
            "tokens": {str(drafts): rounded(yield_of(alone, drafts)) for drafts in DRAFT_TOKENS},
        },
    }


def speculation_of(accepted: Mapping[str, Any]) -> Speculation:
    """What simulated engines accept."""
    return Speculation(
        DRAFT_TOKENS, tuple(tuple(accepted["tokens"][str(drafts)]) for drafts in DRAFT_TOKENS)
    )


def _read(source: str, data: Path, stride: int) -> tuple[dict[str, list[Sample]], int]:
    """Every `stride`th sample of a source, by prompt; and the tokens that the source counts in
    them."""
    found: defaultdict[str, list[Sample]] = defaultdict(list)
    counted, vocabulary = 0, dict[str, int]()
    with gzip.open(
        data / source / SOURCES[source][0], "rt", encoding="utf-8", newline="\n"
    ) as lines:
        for number, text in enumerate(lines):
            if number % stride:
                continue
            try:
                row = json.loads(text)
                turns = [(step["gen"] or "", step["obs"] or "") for step in row["steps"]]
                found[row["prompt_id"]].append(Sample(row[FIRST_TEXT[source]], turns, vocabulary))
                counted += sum(step["gen_tokens"] for step in row["steps"])
            except (KeyError, TypeError, json.JSONDecodeError) as error:
                raise PublicTraceError(
                    f"{source}: line {number + 1}: {type(error).__name__}: {error}"
                ) from error
    return found, counted


def _with_siblings(
    groups: Iterable[Sequence[Sample]], count: int
) -> list[tuple[Sample, Sequence[Sample]]]:
    """Each sample with `count` others of its prompt, those that follow it in turn."""
    return [
        (sample, [group[(at + further) % len(group)] for further in range(1, count + 1)])
        for group in groups
        for at, sample in enumerate(group)
    ]


def yield_of(replayed: Iterable[tuple[Sample, Sequence[Sample]]], most_drafts: int) -> float:
    """Mean tokens that a verification yields over samples, each with its finished siblings; at
    least 1."""
    sampled = verified = 0
    for sample, siblings in replayed:
        for yielded in replay(sample, siblings, most_drafts):
            sampled += yielded
            verified += 1
    return sampled / verified if verified else 1.0


def replay(sample: Sample, siblings: Sequence[Sample], most_drafts: int) -> Iterable[int]:
    """Tokens of each verification in turn. The first token of each turn comes from its prefill."""
    parting = np.array([PARTING], np.int32)
    known = [part for sibling in siblings for part in (sibling.tokens, parting)]
    text = np.concatenate([*known, sample.tokens])
    own = len(text) - len(sample.tokens)
    for begin, end in sample.turns:
        at, last = own + begin + 1, own + end
        while at < last:
            start = find_draft(text, at)
            accepted = 0
            while accepted < most_drafts and start + accepted < at and at + accepted < last - 1:
                if text[start + accepted] != text[at + accepted]:
                    break
                accepted += 1
            yield accepted + 1
            at += accepted + 1


def find_draft(text: Tokens, at: int) -> int:
    """Where the draft for position `at` of the text begins: behind the last occurrence of the
    longest suffix of what stands before; `at` itself for none."""
    places = np.flatnonzero(text[: at - 1] == text[at - 1])
    for length in range(1, min(MOST_SUFFIX, at)):
        longer = places[places >= length]
        longer = longer[text[longer - length] == text[at - 1 - length]]
        if not len(longer):
            break
        places = longer
    return int(places[-1]) + 1 if len(places) else at
