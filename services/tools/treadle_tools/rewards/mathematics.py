r"""Decide whether an answer equals a gold: read both as a whole, and compare them.

The final answer of a text is its last \boxed, its last <answer>, what stands behind `####`, or the
last formula of its prose; never a part of its reasoning. latex2sympy reads it as one expression,
never a part of it, so that `2\sqrt{3}` is not 2, and math-verify compares two expressions. A text
that is no mathematics ("June 20") equals the same text only. All of it runs in a process of its
own, which ends in COMPARISON_S whatever an answer holds.
"""

import contextlib
import json
import logging
import os
import re
import resource
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy import Eq, Float, I, UnevaluatedExpr, simplify

from treadle_tools.rewards import expected_of, remove_reasoning
from treadle_tools.tool import InvalidArguments, Outcome

Expression = Any  # Basic or MatrixBase of sympy, which has no types


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it bounds no times

COMPARISON_S = 10.0  # within the wall clock of the reward; most take some milliseconds
KEPT_BYTES = 128 * 1024 * 1024  # of the reward's memory, for the process that waits
MOST_SHOWN_CHARS = 200  # of the final answer
MOST_FORMULA_CHARS = 2_000  # longer ones are compared as texts only
TAIL_CHARS = 4_000  # of prose, at whose end the final answer stands

# The library's own units are off: they include single letters, which may be variables (`5t`).
NORMALIZATION = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
CONVERSION = ConversionConfig(lowercase_symbols=False)  # R and r are two variables
ROUNDED_DECIMALS = 6  # so that 0.333333 is 1/3
DECIMAL_DIGITS, EXACT_DIGITS = 15, 100
MOST_RELATIVE_ERROR = 1e-5  # of a number that is rounded to six decimals

# In this order.
SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!", ""),
        (r"(?<!\\)\\[,;: ]|(?<!\\)\\q?quad(?![A-Za-z])|~", " "),
        (r"\*\*", "^"),
        (r"∞", r"\\infty "),
        (r"√\s*(\d+|\w)", r"\\sqrt{\1}"),
        (r"(\\sqrt\s*\[[^\[\]]*\])\s*(\w)", r"\1{\2}"),
        (r"\\[dt]?binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
        (r"(?:\{|^)([^{}]*)\\choose(?![A-Za-z])([^{}]*)(?:\}|$)", r"\\binom{\1}{\2}"),
        (r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}"),
        (r"\\(sin|cos|tan)\s*\^\s*\{\s*-1\s*\}", r"\\arc\1"),
        (r"(?i)\\text\s*\{\s*infinity\s*\}|(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty "),
        (
            r"(?<![A-Za-z\\])(?<!\\text\{)(?<!\\mathrm\{)(?<!\\operatorname\{)"
            r"(sin|cos|tan|ln|log|exp|pi)(?![A-Za-z])",
            r"\\\1 ",
        ),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"(\.\d*?)(\d)\2{2,}(?:\.{3}|\\l?dots|…)", r"\1\\overline{\2}"),
        (r"°|\^?\s*\\degree", r"^\\circ"),
        ("²", "^2"),
        ("³", "^3"),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"(?:\\left\s*)?\\langle", "("),
        (r"(?:\\right\s*)?\\rangle", ")"),
        # 1 000 and 1.5e3
        (r"(?<![\d.,])(\d{1,3}) (\d{3}) (\d{3})(?![\d.])", r"\1\2\3"),
        (r"(?<![\d.,])(\d{1,3}) (\d{3})(?!\d)", r"\1\2"),
        (r"(?<=\d)[eE]([+-]?\d+)(?![\w.])", r"\\cdot 10^{\1}"),
        # A number of another base than ten, which the library reads as one of base ten
        (r"(?<![\w.])(\d[\dA-F]*)_(?:\{\s*(\d+)\s*\}|(\d+))", r"\\text{\1 of base \2\3}"),
    )
]
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{\s*(\d+)\s*\}")
# After the library's normalization, which braces both parts of a fraction.
MIXED = re.compile(
    r"(?<![\w^.])(\d+)\s*(?:\\frac\{(\d+)\}\{(\d+)\}|(?<=\s)(\d+)/(\d+)(?![\d/]))(?!\w)"
)
PRODUCT = re.compile(r"(?<![\w^.\\])(\d+(?:\.\d+)?|(?<=\))|(?<=\}))\s*(?=\(\s*-?\d+\s*\))")
TIME_OR_DATE = re.compile(r"\d{1,2}:\d\d(?::\d\d)?|\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{2,4}")
TWO_NUMBERS = re.compile(r"[\d.]\s+\.?\d")
ASSIGNMENT = re.compile(r"\s*([A-Za-z](?:_\w|_\{\w+\})?|\\[A-Za-z]+)\s*=([^=]+)")
SEPARATOR = re.compile(r"[,;]|\\text\s*\{\s*and\s*\}|\band\b")
PERCENT = re.compile(r"\\?%|\\text\{\s*percent\s*\}|\s*\bpercent\b")

# The library takes the variables of a greatest common divisor for polynomials without a common one.
DIVISORS = re.compile(r"gcd|lcm")
VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
LOGARITHM = re.compile(r"\\log(?![A-Za-z]|\s*_)")  # the library takes it for one of base ten
COMPLEX = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
SUMS = re.compile(r"\\(?:sum|prod)")  # whose index is often i

TEXT_COMMAND = r"\\(?:text|mbox|mathrm|textrm|textbf|textit|operatorname)\s*"
TEXTS = re.compile(TEXT_COMMAND + r"\{([^{}]*)\}")
WORD = re.compile(r"[A-Za-z]{2,}")
FUNCTIONS = _words(
    "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp sqrt pi inf",
    "infinity min max gcd lcm mod det dim ker and or",
)
SHORT_WORDS = _words("am an as at be by do he if in is it me my no of on so to up us we No")
COMMAND = re.compile(r"\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+")

UNIT_NAMES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "lb": "lbs pound",
    "oz": "ounce",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "s": "sec second",
    "min": "mins minute",
    "h": "hr hrs hour",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "degree": "deg",
    "radian": "rad",
    "dollar": "usd",
    "cent": "",
    "unit": "",
}
POWERS = {"square": "2", "squared": "2", "sq": "2", "cubic": "3", "cubed": "3", "cu": "3"}
NO_UNITS = FUNCTIONS | _words("are at for if is less more not other than to when where with")
UNITS = {
    spelling: name
    for name, others in UNIT_NAMES.items()
    for other in (name, *others.split())
    for spelling in (other, other + "s", other + "es")
}
POWER = r"(?:\s*\^\s*(?:\{\s*\d\s*\}|\d)|[²³])?"
UNIT = re.compile(
    r"(?P<value>.*(?:[\w)}\]|!°%]|\^\*))"
    rf"(?P<unit>(?:\s*{TEXT_COMMAND}\{{(?!\s*[ie]\s*\}})[^{{}}]*[A-Za-z][^{{}}]*\}}{POWER}[.\s]*)+"
    rf"|\s+(?:[A-Za-z]{{2,}}\.?(?:\s+|(?={POWER}$)))*[A-Za-z]{{2,}}\.?{POWER})",
    re.DOTALL,
)


@dataclass(frozen=True)
class Formula:
    """A formula, or a text that is none, without its unit. unit: "" where there is none."""

    text: str
    unit: str = ""


def math_equal(arguments: Mapping[str, Any]) -> Outcome:
    """Score 1.0 where the final answer of a text equals an expected one as mathematics, else 0.0.

    An answer that takes too long to compare, or too much memory, is wrong.
    """
    golds = [read_gold(text) for text in expected_of(arguments)]
    if not all(gold.text for gold in golds):
        raise InvalidArguments("expected", "holds no answer: give each one a text")
    comparison = compare(golds, arguments["answer"])
    return Outcome(output=comparison.shown, reward=float(comparison.is_right))


@dataclass(frozen=True)
class Comparison:
    """How an answer compares. is_right: with any of the golds. shown: its final answer."""

    is_right: bool
    shown: str


def compare(golds: Sequence[Formula], answer: str) -> Comparison:
    """Compare an answer with golds, each of which will do; wrong where it takes too long."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _compare_and_exit(golds, answer, write_end)
    os.close(write_end)
    try:
        ready, _, _ = select.select([read_end], [], [], COMPARISON_S)
        message = os.read(read_end, 64 * 1024) if ready else b""
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not message:
        ended = "was not compared with the formula" if ready else f"took over {COMPARISON_S:g} s"
        return Comparison(is_right=False, shown=f"(the answer {ended})")
    return Comparison(**json.loads(message))


def _compare_and_exit(golds: Sequence[Formula], answer: str, write_end: int) -> None:
    """Write the comparison as JSON, and end this process; without a word where it fails."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (max(soft - KEPT_BYTES, 0), hard))
        given = read_answer(answer)
        pairs = [(gold, each) for gold in golds for each in given]
        # A comparison that takes long must not come before a quick one.
        is_right = any(_have_same_text(*pair) for pair in pairs) or any(
            are_equal(*pair) for pair in pairs
        )
        shown = (given[-1].text + given[-1].unit)[:MOST_SHOWN_CHARS]
        os.write(write_end, json.dumps(vars(Comparison(is_right, shown))).encode())
    finally:
        os._exit(0)


def read_gold(text: str) -> Formula:
    """Return the final answer of a gold; its text is empty where the gold holds none."""
    final = _final(text)
    formula = _formula(text if final is None else final)
    return formula if _plain(formula.text + formula.unit) else Formula("")


def read_answer(text: str) -> list[Formula]:
    """Return what the final answer of a text may be: more than one only where prose has it."""
    text = remove_reasoning(text)
    if (final := _final(text)) is not None:
        return [_formula(final)]
    text = text.strip()[-TAIL_CHARS:]
    whole = _formula(text)
    return [whole, *_find_in_prose(text)] if _is_prose(whole.text) else [whole]


def are_equal(gold: Formula, answer: Formula) -> bool:
    """Return whether an answer equals a gold: as a text, or as an expression in the same unit."""
    if _have_same_text(gold, answer):
        return True
    if _units_differ(gold.unit, answer.unit) or _brackets_differ(gold.text, answer.text):
        return False
    if _are_same_texts(gold.text, answer.text):
        return True
    texts = [gold.text, answer.text]
    if all(PERCENT.search(text) for text in texts):
        texts = [PERCENT.sub("", text) for text in texts]
    assigned = [_read_assignments(text) for text in texts]
    if all(assigned) and assigned[0].keys() != assigned[1].keys():
        return False
    texts = [
        f"({', '.join(values[name] for name in sorted(values))})" if values else text
        for text, values in zip(texts, assigned, strict=True)
    ]
    if any(r"\ln" in text for text in texts):
        texts = [LOGARITHM.sub(r"\\ln", text) for text in texts]
    is_real = not any(COMPLEX.search(text) or should_treat_as_complex(text) for text in texts)
    right, given = (_parse(text, is_real=is_real) for text in texts)
    if right is None or given is None:
        return False
    if _are_same_values(right, given):
        return True
    # Like a unit, the percent sign of a gold may be missing in the answer.
    number = PERCENT.sub("", gold.text)
    if number == gold.text or PERCENT.search(answer.text):
        return False
    right = _parse(number, is_real=is_real)
    return right is not None and _are_same_values(right, given)


def _final(text: str) -> str | None:
    """Return what a text marks as its final answer; None where it marks nothing."""
    if boxes := list(_boxes(text)):
        final, start = boxes[-1][2], boxes[-1][0]
        for before, end, content in reversed(boxes[:-1]):
            # Not a box of an earlier attempt: the solutions of one list
            if not re.fullmatch(
                r"[\s$]*(?:,|;|,?\s*(?:\\text\{)?\s*(?:and|or)\s*\}?)[\s$]*", text[end:start]
            ):
                break
            final, start = f"{content}, {final}", before
        return final
    for mark in ("<answer>", "####"):
        _, found, tail = text.rpartition(mark)
        if found:
            return tail.partition("</answer>")[0]
    return None


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    r"""Yield start, end and content of each \boxed that is not within another one."""
    at = 0
    for found in re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<brace>\{)?", text):
        if found.start() < at:
            continue
        at = _end_of_group(text, found.end()) if found["brace"] else found.end() + 1
        if found["brace"]:
            yield found.start(), at, text[found.end() : at - 1]
        else:
            yield found.start(), at, text[found.end() : at]


def _end_of_group(text: str, at: int) -> int:
    """Return where the group ends whose opening brace stands before `at`."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[at:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return at + brace.end()
    return len(text) + 1


def _formula(text: str) -> Formula:
    text = _strip(text)
    if len(text) <= MOST_FORMULA_CHARS and (found := UNIT.fullmatch(text)) is not None:
        value, unit = _strip(found["value"]), found["unit"]
        is_formula = not (TEXTS.fullmatch(value) or (_is_prose(value) and "\\" not in unit))
        if is_formula and _is_unit(unit, value):
            return Formula(value, unit)
    return Formula(text)


def _is_unit(unit: str, value: str) -> bool:
    words = _words_of(unit)
    if all(word in UNITS or word in POWERS for word in words) and "\\" in unit:
        return True
    if not re.search(r"\d|\\pi", value) or NO_UNITS.intersection(words):
        return False
    # Outside of LaTeX's text, two letters may be a product.
    return "\\" in unit or words[-1] in UNITS or all(len(word) > 2 for word in words)


def _strip(text: str) -> str:
    """Remove what stands around a formula: dollars, brackets of LaTeX, marks of Markdown."""
    while True:
        before = text
        text = re.sub(r"^[*`\s]+|(?<!\^)(?<![*`\s])[*`\s]+$", "", text)
        text = re.sub(r"(?<![\\.])[.,;:]$|^=", "", text)
        for pattern in (
            r"\$\$(.*)\$\$",
            r"\$((?:[^$]|\\\$)*)(?<!\\)\$",
            r"\\\((.*)\\\)",
            r"\\\[(.*)\\\]",
            r"\{([^{}]*)\}",
            r"\\displaystyle(?![A-Za-z])(.*)",
        ):
            if found := re.fullmatch(pattern, text, re.DOTALL):
                text = found[1]
        if text == before:
            return text


def _find_in_prose(text: str) -> Iterator[Formula]:
    """Yield the sentence that "the answer is" opens, and its first formula; without such words the
    last formula of all."""
    anchors = list(re.finditer(r"(?i)\banswer\b[^.\n$\\]{0,60}?(?:\bis\b:?|:|=)\**", text))
    if anchors:
        after = text[anchors[-1].end() :].strip()
        yield _formula(re.split(r"(?<=[^\s\d])\.(?:\s|$)|\n|\.$|\.\s", after, maxsplit=1)[0])
        if found := next(_runs(after), None):
            yield _formula(found)
    elif runs := list(_runs(text)):
        yield _formula(runs[-1])


TOKEN = re.compile(
    r"[*(]*(?:\$\$.+?\$\$|(?<!\\)\$(?=\S)[^$\n]*?(?<=\S)(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\])[^\s$]*"
    r"|\S+",
    re.DOTALL,
)


NO_FORMULAS = ("", "a", "I", "-", "–", "—")


def _runs(text: str) -> Iterator[str]:
    """Yield each longest run of formulas, in dollars or bare, up to a word or a point."""
    run: list[str] = []
    for token in TOKEN.findall(text):
        formula = _strip(token)
        unit = formula if len(formula) > 1 and formula.lower() in UNITS else ""
        is_formula = not (unit or _is_prose(formula) or formula in NO_FORMULAS)
        joins = formula in ("and", "or") and run
        if is_formula and run and "$" in token and run[-1][-1] not in ",=" and run[-1] != ", ":
            yield _close(run)
            run = []
        if joins:
            run.append(", ")
        elif is_formula:
            run.append(formula + ("," if token.rstrip("*").endswith(",") else " "))
        if run and not joins and (not is_formula or re.search(r"[.;:?]\**$", token)):
            yield _close(run) + (rf"\text{{ {unit}}}" if unit else "")
            run = []
    if run:
        yield _close(run)


def _close(run: list[str]) -> str:
    text = "".join(run).strip(" ,")
    while (
        text.count(")") + text.count("]") > text.count("(") + text.count("[") and text[-1] in ")]"
    ):
        text = text[:-1]
    return text


def _is_prose(text: str) -> bool:
    """Return whether a text has words that are no functions, outside of LaTeX's own commands."""
    words = WORD.findall(COMMAND.sub(" ", TEXTS.sub(" ", text)))
    return any(
        word.lower() not in FUNCTIONS and (len(word) > 2 or word in SHORT_WORDS) for word in words
    )


def _have_same_text(gold: Formula, answer: Formula) -> bool:
    return _are_same_texts(gold.text + gold.unit, answer.text + answer.unit)


def _are_same_texts(first: str, second: str) -> bool:
    texts = [_plain(each) for each in (first, second)]
    return texts[0] == texts[1] != ""


def _plain(text: str) -> str:
    """Return a text without what LaTeX writes and does not mean; words are in lower case."""
    text = TEXTS.sub(r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|(?<!\\)\\[,;: ]|[$~]", " ", text)
    text = re.sub(r"\\!", "", text).replace("{,}", ",")
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(
        r"(?<![\\A-Za-z])(?:[A-Za-z][a-z]+|[A-Z]{3,})", lambda word: word[0].lower(), text
    )
    text = re.sub(r"(?i)(?<=\d)\s*([ap]m)\b", lambda found: found[1].lower(), text)
    text = re.sub(r"\s+", " ", text)
    return re.sub(r"(?<![^\W_]) | (?![^\W_])", "", text).rstrip(".")


def _units_differ(first: str, second: str) -> bool:
    """Return whether two units have no word in common, or another power. No unit is any."""
    words = [
        {UNITS.get(word, word.rstrip("s")) for word in _words_of(each)} for each in (first, second)
    ]
    powers = [_power_of(each) for each in (first, second)]
    names = [each - POWERS.keys() for each in words]
    return all(names) and (powers[0] != powers[1] or names[0].isdisjoint(names[1]))


def _words_of(unit: str) -> list[str]:
    return re.findall(r"[a-z]+", TEXTS.sub(r" \1 ", unit).lower().replace("mph", "mi h"))


def _power_of(unit: str) -> str:
    if found := re.search(r"\^\s*\{?\s*(\d)", unit.replace("²", "^2").replace("³", "^3")):
        return found[1]
    return next((POWERS[word] for word in _words_of(unit) if word in POWERS), "")


def _brackets_differ(first: str, second: str) -> bool:
    """Return whether one is a set in braces and the other a tuple or an interval, which the library
    takes for the same."""
    opens = [re.sub(r"\\left\s*", "", each).lstrip()[:2] for each in (first, second)]
    return any(
        opens[at] == r"\{" and opens[1 - at][:1] in ("(", "[") and "," in (first, second)[1 - at]
        for at in (0, 1)
    )


def _read_assignments(text: str) -> dict[str, str]:
    """Return the values that a list gives to several variables; none where it is another text.

    The library compares such a list with a tuple as if neither had an order.
    """
    parts = [ASSIGNMENT.fullmatch(part) for part in SEPARATOR.split(text)]
    values = {found[1]: found[2] for found in parts if found}
    return values if len(values) == len(parts) > 1 else {}


def _parse(text: str, *, is_real: bool) -> Expression | None:
    """Return the expression that the whole text is; None where it is no mathematics."""
    if len(text) > MOST_FORMULA_CHARS or _is_prose(text) or TIME_OR_DATE.fullmatch(text):
        return None
    for spelling, replacement in SPELLINGS:
        text = spelling.sub(replacement, text)
    text = normalize_latex(REPEATING.sub(_as_fraction, text), NORMALIZATION)
    text = MIXED.sub(_as_sum, text)
    text = PRODUCT.sub(r"\1 \\cdot ", text)
    if TWO_NUMBERS.search(text) or (DIVISORS.search(text) and VARIABLE.search(text)):
        return None
    with contextlib.suppress(Exception):  # the library raises what it likes
        expression = latex2sympy(
            text, is_real=is_real, normalization_config=None, conversion_config=CONVERSION
        )
        return expression if is_real or SUMS.search(text) else _with_imaginary_unit(expression)
    return None


def _with_imaginary_unit(expression: Expression) -> Expression:
    """Return an expression with the number i in place of the library's variable of this name."""
    return expression.subs({each: I for each in expression.free_symbols if each.name == "i"})


def _as_fraction(number: re.Match[str]) -> str:
    """Return a decimal with repeating digits as a fraction."""
    whole, once, repeated = number.groups()
    top = int(f"{whole}{once}{repeated}") - int(f"{whole}{once}" or "0")
    return rf"\frac{{{top}}}{{{'9' * len(repeated)}{'0' * len(once)}}}"


def _as_sum(number: re.Match[str]) -> str:
    whole, top, bottom = (part for part in number.groups() if part is not None)
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})"


def _are_same_values(gold: Expression, answer: Expression) -> bool:
    with contextlib.suppress(TypeError, ValueError, ArithmeticError, AttributeError):
        if isinstance(gold, Eq) and isinstance(answer, Eq):
            return _are_same_equations(gold, answer)
        if _are_far(gold, answer):
            return False
    exact = not any(each.has(Float) for each in (gold, answer))
    return bool(
        verify(
            gold,
            answer,
            float_rounding=ROUNDED_DECIMALS,
            numeric_precision=EXACT_DIGITS if exact else DECIMAL_DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def _are_same_equations(gold: Eq, answer: Eq) -> bool:
    """Return whether one equation is a multiple of the other.

    The library solves both, and takes two without solutions for the same.
    """
    ratio = simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def _are_far(gold: Expression, answer: Expression) -> bool:
    """Return whether two numbers differ by more than rounding, however small both are. The library
    compares a fixed number of decimals."""
    if any(each.has(UnevaluatedExpr) for each in (gold, answer)):
        return False  # a percentage, which the library compares both ways
    first, second = (each.doit().evalf(DECIMAL_DIGITS) for each in (gold, answer))
    if not (first.is_number and second.is_number):
        return False
    return bool(abs(first - second) > MOST_RELATIVE_ERROR * max(abs(first), abs(second)))
