"""`math_equal`: which answers are right, for golds of each sort that public sets hold."""

from typing import Any

import pytest
from treadle_tools.rewards import exact_match, mathematics
from treadle_tools.tool import InvalidArguments

# Gold, then answers that are right.
RIGHT: list[tuple[str, list[str]]] = [
    # The whole gold is read
    (r"2\sqrt{3}", [r"\boxed{2\sqrt{3}}", r"2\sqrt3", r"\sqrt{12}", r"It is 2 \sqrt{3} cm."]),
    (r"3\pi", [r"\boxed{3\pi}", "3π", r"the answer is $3\pi$."]),
    ("5x+1", ["1+5x", r"\boxed{5x + 1}"]),
    (r"1+\sqrt{2}", [r"\sqrt2+1"]),
    ("10!", ["10!", "3628800"]),
    (r"\binom{5}{2}", ["10", r"\binom52", r"{5 \choose 2}"]),
    (r"\frac{\ln 2}{2}", ["ln(2)/2", r"\frac{ln 2}{2}"]),
    (r"2\pi r", ["2*pi*r", "2πr"]),
    (r"\arctan 2", [r"\tan^{-1}(2)"]),
    (r"\sqrt[3]{2}", [r"\sqrt[3]2", "2^{1/3}"]),
    (r"\mathbb{R}", [r"\mathbb R", r"(-\infty, \infty)"]),
    ("2^{10}", ["1024", "2^10", "2**10"]),
    (r"2^{\aleph_0}", [r"\boxed{2^{\aleph_0}}"]),
    # How a gold is marked
    ("$5$", ["5"]),
    (r"\boxed{5}", ["5"]),
    ("She has 6*7=42.\n#### 42", ["42", "So:\n#### 42", r"\boxed{42}"]),
    (r"\[ 5 \]", [r"\(5\)"]),
    # Numbers
    ("1,000", ["1000", "1{,}000", r"1\,000", "1 000", r"1,\!000", "1,000.0"]),
    ("-5", ["−5", "-5.0"]),
    (r"4\frac{1}{2}", ["4.5", r"\frac92", "4 1/2", r"4 \tfrac12"]),
    (r"-4\frac{1}{2}", ["-4.5", r"-\frac{9}{2}"]),
    (r"\frac12", [r"\dfrac{1}{2}", r"\tfrac12", "1/2", "0.5", ".5", r"\frac{-1}{-2}"]),
    (r"0.\overline{3}", ["1/3", r"0.\overline{3}", "0.333333", "0.333..."]),
    (r"1.2\overline{3}", [r"\frac{37}{30}"]),
    ("1500", ["1.5e3", r"1.5 \times 10^3"]),
    ("10", ["5(2)", r"5 \cdot 2"]),
    ("25_8", ["25_{8}"]),
    # Units
    (r"5\text{ cm}", ["5", "5 cm", r"5\,\mathrm{cm}", r"5 \text{ centimeters}"]),
    (r"90\text{ square units}", ["90", r"90\text{ units}^2"]),
    ("5", [r"5\text{ cm}", "5 apples", r"$5$ apples"]),
    ("18 hours", ["18"]),
    (r"\$18.90", ["18.9", "$18.90", "It costs $18.90."]),
    (r"50\%", ["50", "0.5", r"\frac12", "50 percent"]),
    (r"12.5\%", ["12.5", "0.125"]),
    (r"8\frac{1}{3}\%", [r"8\frac13\%", r"\frac{25}{3}\%"]),
    (r"60\text{ mph}", ["60", "60 miles per hour"]),
    ("50", [r"50\%"]),
    (r"50^\circ", ["50", "50°", "50 degrees"]),
    # Several values
    ("(1,2)", [r"\left( 1, 2 \right)", "x=1,y=2", "y=2 and x=1", "(x,y)=(1,2)"]),
    ("a=1, b=-2", ["b = -2, a = 1", "(1,-2)"]),
    (r"\langle 1, 2 \rangle", ["(1,2)"]),
    (r"(3,\frac{\pi}{2})", [r"\left(3,\dfrac{\pi}{2}\right)"]),
    ("1, 2", ["2, 1", "1 and 2", "x=1 or x=2", "Both $x=1$ and $x=2$.", r"\{2, 1\}"]),
    ("1, 2", [r"$\boxed{1}$ and $\boxed{2}$"]),
    (r"\pm 2", ["2, -2", r"x = \pm 2", r"\{-2, 2\}"]),
    (r"1 \pm \sqrt{2}", [r"1-\sqrt2, 1+\sqrt2"]),
    (r"[1,2)", [r"\left[1,2\right)", r"x \in [1,2)", r"1 \le x < 2"]),
    (r"(-\infty, 3)", ["x < 3"]),
    (r"(-\infty, -2) \cup (0, 1)", ["(-∞,-2) U (0,1)", r"(-\infty,-2)\cup(0,1)"]),
    (r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}", [r"\begin{bmatrix} 0.5 \\ 2 \end{bmatrix}"]),
    (r"\emptyset", [r"\varnothing"]),
    # Expressions
    ("x=5", ["5", "x = 5", "5=x"]),
    ("y = x+3", ["x+3", "y-x=3"]),
    ("2x+y=4", ["4x+2y=8"]),
    ("x^2-1", ["(x-1)(x+1)"]),
    ("13", ["(2+3i)(2-3i)"]),
    ("2+3i", ["3i+2"]),
    (r"\infty", ["infinity", "Infinity", r"\text{infinity}", r"+\infty"]),
    (r"\ln 5", [r"\log 5"]),
    (r"\sqrt{x}", [r"\sqrt{x}\text{ units}"]),
    (r"e^{-as}F(s)", [r"e^{-as}F(s)\text{ units}"]),
    (r"(\ker g)^*", [r"\boxed{(\ker g)^*}", r"\boxed{(\ker g)^*\text{ units}}"]),
    (r"\frac{1}{2004!}", [r"\dfrac{1}{2004!}"]),
    # Texts
    (r"\text{Friday}", ["Friday", "friday", r"\boxed{\textbf{Friday}}", "The answer is Friday."]),
    (r"\text{(A)}", ["A", "(A)", "The answer is A."]),
    ("June 20", [r"\text{June 20}", "The answer is June 20."]),
    (r"\text{A,C,F}", ["A, C, F"]),
    ("yes", ["Yes", "**Yes**"]),
    (r"\text{3:45 PM}", ["3:45 pm"]),
    # The last answer of a text
    ("5", [r"\boxed{3}. No: \boxed{5}", r"\boxed{\boxed{5}}", r"$\fbox{5}$", r"\boxed 5"]),
    ("7", ["<answer>7</answer>", "<answer> $7$ </answer>", "= 7"]),
    (
        "7",
        [
            r"<think>\boxed{5}</think>\boxed{7}",
            "<think>Is it 5?</think>7",
            r"It may be \boxed{5}.</think>The answer is 7.",
        ],
    ),
    ("7", ["3 apples and 4 pears make 7.", "3+4=7", "**Answer:** 7", "Final answer: $x = 7$"]),
    (r"\frac{1}{\sqrt{2}}", [r"so $\boxed{\frac{1}{\sqrt{2}}}$."]),
]
# Gold, then answers that are wrong.
WRONG: list[tuple[str, list[str]]] = [
    (r"2\sqrt{3}", ["2", r"\boxed{2}", "3", r"3\sqrt{2}"]),
    ("2", [r"2\sqrt{3}", r"the answer is 2\sqrt{3}.", r"4\frac{1}{2}", "4 1/2", r"\pm 2"]),
    (r"3\pi", ["3", r"\pi"]),
    ("5x+1", ["5", "5x-1"]),
    (r"1+\sqrt{2}", ["1"]),
    ("10!", ["10"]),
    ("2^{10}", ["2", "10"]),
    (r"4\frac{1}{2}", ["2", "4"]),
    (r"2^{\aleph_0}", ["2"]),
    ("5", ["5t", "5x", "", r"\boxed{}", "I do not know", r"\boxed{5} and then \boxed{3}"]),
    ("5t", ["5"]),
    ("R", ["r"]),
    ("1000", ["(1,000)", "1"]),
    ("(1,000)", ["1000"]),
    ("1 2", ["12", "2"]),
    ("7", ["5(2)"]),
    ("25_8", ["25_7", "25", "21"]),
    ("25", ["25_8"]),
    (r"0.\overline{3}", ["0.3", "0", "3"]),
    (r"\frac13", ["0.33"]),
    (r"\pi", ["3.14"]),
    ("0.0000001", ["0.0000002", "0"]),
    ("10^{-60}", ["10^{-61}"]),
    ("e^{-100}", ["e^{-50}"]),
    (r"\frac{1}{2004!}", [r"\frac{1}{2005!}"]),
    (r"50\%", ["5", r"0.5\%"]),
    ("0.5", [r"0.5\%", "50"]),
    (r"0.5\%", [r"50\%"]),
    (r"5\text{ cm}", ["5 m", r"5\text{ cm}^2", r"6\text{ cm}"]),
    (r"81\text{ teachers}", [r"81\text{ pupils}"]),
    (r"5\text{ or more}", ["5", r"5\text{ or less}"]),
    (r"n\text{ is odd}", ["n", r"n\text{ is even}"]),
    ("7", [r"<think>\boxed{7}</think>", r"<think>\boxed{7}", r"\boxed{7}</think>No idea."]),
    ("x=1, y=2", ["(2,1)", "x=2, y=1", "a=1, b=2"]),
    ("10:30", ["1/3", "10:31"]),
    ("2024-01-15", ["2008", "2024-01-16"]),
    ("(1,2)", ["(2,1)", "x=2,y=1", "[1,2]", r"\{1,2\}"]),
    (r"\{1,2\}", ["(1,2)"]),
    ("1,2", ["1", "1,3"]),
    ("1", ["1,2"]),
    (r"\infty", [r"-\infty"]),
    ("x=5", ["y=5", "x=6"]),
    ("x^2+1=0", ["x^2+2=0"]),
    (r"\sin x=2", [r"\sin x=3"]),
    ("I=J", ["I=K"]),
    (r"\gcd(k, p-1)", [r"\gcd(k, p-2)"]),
    ("x>3", [r"x \ge 3", "y>3"]),
    ("2+3i", ["2-3i", "2"]),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\begin{pmatrix} 1 & 2 \end{pmatrix}"]),
    (r"\text{Friday}", ["Thursday"]),
    ("yes", ["no", "eys"]),
    ("June 20", ["20", "June 21"]),
    (r"\overline{AB}", [r"\overline{CD}"]),
]


def is_right(gold: str, answer: str) -> bool:
    """Whether an answer is right, compared in this process."""
    read = mathematics.read_answer(answer)
    return any(mathematics.are_equal(mathematics.read_gold(gold), each) for each in read)


@pytest.mark.parametrize(("gold", "answers"), RIGHT, ids=[gold for gold, _ in RIGHT])
def test_a_gold_equals_itself_and_what_it_means(gold: str, answers: list[str]) -> None:
    assert [answer for answer in [gold, *answers] if not is_right(gold, answer)] == []


@pytest.mark.parametrize(("gold", "answers"), WRONG, ids=[gold for gold, _ in WRONG])
def test_a_gold_differs_from_its_parts_and_neighbours(gold: str, answers: list[str]) -> None:
    assert [answer for answer in answers if is_right(gold, answer)] == []


def score(answer: str, expected: Any) -> float | None:
    return mathematics.math_equal({"answer": answer, "expected": expected}).reward


def test_any_of_several_golds_will_do() -> None:
    assert score("1/2", ["7", r"\frac12"]) == 1.0
    assert score("8", ["7", r"\frac12"]) == 0.0


@pytest.mark.parametrize("gold", ["", " \n", "$$", r"\boxed{}", "####", r"\text{}", "."])
def test_a_gold_without_an_answer_is_refused_by_name(gold: str) -> None:
    with pytest.raises(InvalidArguments, match="expected"):
        score("", ["5", gold])


def test_an_empty_text_to_match_is_refused_by_name() -> None:
    with pytest.raises(InvalidArguments, match="expected: is empty"):
        exact_match({"answer": "", "expected": ["Rome", " "]})


def test_a_text_is_matched_behind_its_reasoning() -> None:
    arguments = {"expected": "Rome", "ignore_spaces": False}
    texts = ("<think>Paris?</think>\n\nRome", "Paris?</think>Rome", "<think>Rome")
    scores = [exact_match({"answer": text, **arguments}).reward for text in texts]
    assert scores == [1.0, 1.0, 0.0]


HOSTILE = {
    "a tower of powers": r"\boxed{9^{9^{9^9}}}",
    "a plain tower": "9**9**9**9",
    "a factorial": r"\boxed{1000000000!}",
    "an integral": r"\boxed{\int_0^1 x^{x^{x^x}} dx}",
    "deep brackets": r"\boxed{" + "(" * 900 + "5" + ")" * 900 + "}",
    "deep fractions": r"\frac{" * 400 + "1" + "}{2}" * 400,
    "a long number": "1" * 1_000_000,
    "a huge number": r"\boxed{" + "9" * 1900 + "!}",
    "open boxes": r"\boxed{" * 50_000,
    "dollars": "$" * 500_000,
    "anchors": "answer is " * 50_000,
    "a lone surrogate": "\ud800",
    "a zero byte": "5\x00 6",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_answer_is_wrong_and_ends(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result: a score of 0, and the next answer is scored."""
    monkeypatch.setattr(mathematics, "COMPARISON_S", 0.5)
    assert score(answer, "5") == 0.0
    assert score("5", "5") == 1.0


def test_a_gold_that_takes_long_does_not_keep_a_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "COMPARISON_S", 2.0)
    assert score(r"\boxed{\frac12}", [r"9^{9^{9^9}}", r"\frac12"]) == 1.0
