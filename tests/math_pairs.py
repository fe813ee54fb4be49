"""Pairs of answers whose verdict is known by construction: values, the forms that they are written in, and responses.

A value is drawn first, as numbers; what is written is made from them, so no reader of mathematics decides what is
expected. Unequal pairs differ in the drawn value by a step that the forms show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Pair:
    """A response with the data's answer and whether it is right."""

    kind: str
    response: str
    truth: str
    is_right: bool


Draw = random.Random
Made = tuple[str, str, bool]
"""An answer, the truth, and whether they are equal."""


def pairs(seed: int, count: int) -> Iterator[Pair]:
    """Pairs of all kinds in turn, each kind with as many right as wrong ones."""
    makers = list(_MAKERS.items())
    for number in range(count):
        kind, maker = makers[number % len(makers)]
        draw = random.Random(f"{seed} {number}")
        answer, truth, is_right = maker(draw, number // len(makers) % 2 == 0)
        response = f"so \\boxed{{{answer}}}." if kind == "boxes" else _response(draw, answer)
        yield Pair(kind, response, truth, is_right)


# --- responses ---


def _response(draw: Draw, answer: str) -> str:
    decoy = str(draw.randint(10**6, 10**7))
    return draw.choice([
        f"\\boxed{{{answer}}}",
        f"So the answer is $\\boxed{{{answer}}}$.",
        f"\\[ \\boxed {{{answer}}} \\]",
        f"Therefore \\fbox{{{answer}}}",
        f"I first got \\boxed{{{decoy}}}, but it is \\boxed{{{answer}}}",
        f"Put it in \\boxed{{}}. Then \\boxed{{{answer}}} is final.",
        f"x = \\boxed{{{decoy}}}, so the sum is \\boxed{{{answer}}}.",
        f"<think>maybe \\boxed{{{decoy}}}</think> \\boxed{{{answer}}}",
        f"<think>it is {decoy}</think><answer>{answer}</answer>",
        f"Step 1: 3 + 4 = 7.\n\n**Answer:** \\boxed{{ {answer} }}\n",
        f"\\boxed{{\\boxed{{{answer}}}}}",
        f"${{\\boxed{{{answer}}}}}$ I hope it is correct, {decoy} times.",
    ])  # fmt: skip


# --- integers, rational numbers, decimals ---


def _integer(draw: Draw, is_right: bool) -> Made:
    value = draw.choice([draw.randint(-20, 20), draw.randint(-9999, 9999), draw.randint(10**4, 10**12)])
    other = value if is_right else draw.choice([value + 1, -value or 1, value * 10 or 3, value - 7])
    return _write_integer(draw, other), _plain_integer(draw, value), is_right


def _plain_integer(draw: Draw, value: int) -> str:
    return draw.choice([str(value), f"${value}$", f"{value}.", f"\\boxed{{{value}}}", f" {value} "])


def _write_integer(draw: Draw, value: int) -> str:
    digits, sign = str(abs(value)), "-" if value < 0 else ""
    factor, part = draw.randint(2, 9), draw.randint(-99, 99)
    forms = [
        str(value), f"{value}.", f"{value}.0", f"{value}.00", f"${value}$", f"**{value}**", f"\\mathbf{{{value}}}",
        f"\\boldsymbol{{{value}}}", f"x = {value}", f"x={value}", f"n = {value}.", f"{value}\\text{{ cm}}", f"{value} \\text{{ units}}",
        f"{value}^\\circ", f"{value}^{{\\circ}}", f"{value}\u00b0", f"{value}\\%", f"\\frac{{{value * factor}}}{{{factor}}}",
        f"\\dfrac{{{value * factor}}}{{{factor}}}", f"{value - part} + {part}" if part >= 0 else f"{value - part} - {-part}",
        f"{value} apples", f"{value}\\,\\text{{km}}", f"\\left({value}\\right)", f"{value}\\ ", f"\\,{value}\\;",
        sign + digits.translate(str.maketrans("0123456789", "\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19")),
        sign.replace("-", "\u2212") + digits, sign.replace("-", "\u2013") + digits, f"{sign} {digits}" if sign else f"+{digits}",
        f"{value} \\text{{ square units}}", f"\\text{{{value}}}", f"\\mathrm{{{value}}}", f"{value}\\text{{ dollars}}",
        f"\\frac{{{2 * value}}}2", f"{value} cm^2", f"{value}\\text{{ cm}}^2", f"{value} degrees", f"{{{value}}}", f"\\${value}" if value >= 0 else str(value),
    ]  # fmt: skip
    if abs(value) >= 1000:
        for mark in (",", "\\,", "{,}", ",\\!", "\\;", "~", " ", "{\\,}", "\u2009"):
            forms.append(sign + f"{abs(value):,}".replace(",", mark))
        zeros = len(digits) - len(digits.rstrip("0"))
        if zeros:
            forms.append(f"{sign}{digits[:-zeros]} \\times 10^{{{zeros}}}")
    return draw.choice(forms)


def _rational(draw: Draw, is_right: bool) -> Made:
    value = Fraction(draw.randint(-60, 60) or 7, draw.choice([2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 25, 40]))
    if value.denominator == 1:
        value += Fraction(1, 3)
    step = draw.choice([Fraction(1, value.denominator), Fraction(1, 2), -2 * value])
    given = value if is_right else value + step
    return _write_rational(draw, given), _write_rational(draw, value, is_truth=True), is_right


def _write_rational(draw: Draw, value: Fraction, is_truth: bool = False) -> str:
    above, below, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    factor = draw.randint(2, 6)
    forms = [
        f"{sign}\\frac{{{above}}}{{{below}}}", f"{sign}\\dfrac{{{above}}}{{{below}}}", f"{sign}{above}/{below}",
        f"\\frac{{{sign}{above}}}{{{below}}}", f"{sign}\\tfrac{{{above}}}{{{below}}}",
        f"{sign}\\frac{{{above * factor}}}{{{below * factor}}}",
    ]  # fmt: skip
    if above < 10 and below < 10:
        forms += [f"{sign}\\frac{above}{below}", f"{sign}\\frac{{{above}}}{below}", f"{sign}\\frac {above} {below}"]
    if above > below > 1:
        whole, rest = divmod(above, below)
        forms += [
            f"{sign}{whole}\\frac{{{rest}}}{{{below}}}",
            f"{sign}{whole}\\,\\dfrac{{{rest}}}{{{below}}}",
            f"{sign}{whole} {rest}/{below}",
        ]
    if below in (2, 4, 5, 8, 25, 40):
        decimal = _decimal_text(Fraction(above, below))
        forms += [sign + decimal, f"{sign}{decimal}0", sign + decimal.removeprefix("0")]
        percent = _decimal_text(Fraction(above * 100, below))
        if is_truth is False:
            forms.append(f"{sign}{percent}\\%")
    elif 10 > below > 1 and below in (3, 6, 7, 9):
        forms.append(sign + _repeating_text(above, below, draw.choice(["\\overline", "\\bar"])))
    if not is_truth:
        forms += [f"x = {forms[0]}", f"{forms[0]} \\text{{ m}}", f"\\left({forms[0]}\\right)", f"{forms[0]}."]
    return draw.choice(forms)


def _decimal_text(value: Fraction) -> str:
    """A decimal fraction as it is."""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    digits = str(int(value * 10**places)).rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:]}" if places else digits


def _repeating_text(above: int, below: int, command: str) -> str:
    whole, rest = divmod(above, below)
    digits, seen = "", dict[int, int]()
    while rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, below)
        digits += str(digit)
    start = seen[rest]
    return f"{whole}.{digits[:start]}{command}{{{digits[start:]}}}"


def _rounded(draw: Draw, is_right: bool) -> Made:
    """A decimal to an exact truth: right with three significant digits or more, all of them right."""
    numerator, denominator = draw.randint(1, 500), draw.choice([3, 7, 9, 11, 13, 17, 19, 23])
    if numerator % denominator == 0:
        numerator += 1
    exact = Fraction(numerator, denominator)
    places = draw.randint(3, 8)
    last = round(exact * 10**places)
    if not is_right:
        last += draw.choice([-5, -2, -1, 1, 2, 4])
    if len(str(abs(last))) < 3:
        return "0.123", "\\frac{1}{8}", False
    digits = str(last).rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:]}", f"\\frac{{{numerator}}}{{{denominator}}}", is_right


def _too_coarse(draw: Draw, is_right: bool) -> Made:
    """Two significant digits are too few, an integer truth is exact."""
    if is_right:
        value = draw.randint(100, 10**6)
        return f"{value}.{'0' * draw.randint(1, 3)}", str(value), True
    if draw.random() < 0.5:
        value = draw.randint(1000, 9999)
        return f"{value}.{draw.randint(1, 9)}", str(value), False
    numerator, denominator = draw.choice([(1, 3), (2, 3), (5, 7), (8, 11), (10, 13)])
    return f"{round(numerator / denominator, 2):.2f}", f"\\frac{{{numerator}}}{{{denominator}}}", False


def _scientific(draw: Draw, is_right: bool) -> Made:
    mantissa, exponent = draw.randint(11, 99), draw.choice([-30, -19, -12, -7, 5, 9, 12, 23])
    given = exponent if is_right else exponent + draw.choice([-2, -1, 1, 3])
    text = f"{mantissa // 10}.{mantissa % 10}"
    forms = ["{t} \\times 10^{{{e}}}", "{t} \\cdot 10^{{{e}}}", "{t}e{e}", "{t}\u00d710^{{{e}}}", "{t}E{e}"]
    write = lambda e: draw.choice(forms).format(t=text, e=e)
    truth = draw.choice([write(exponent), _decimal_text(Fraction(mantissa) * Fraction(10) ** (exponent - 1))])
    return write(given), truth, is_right


def _power(draw: Draw, is_right: bool) -> Made:
    """Numbers that differ by little of what a rounded value shows."""
    base, above, exponent = draw.randint(2, 9), draw.randint(3, 11), draw.randint(20, 120)
    given = exponent if is_right else exponent + draw.choice([-1, 1])
    power, other = draw.choice([
        (f"\\frac{{{base}^{{{exponent}}}}}{{{above}^{{{exponent}}}}}", f"\\left(\\frac{{{base}}}{{{above}}}\\right)^{{{given}}}"),
        (f"{base}^{{-{exponent}}}", f"\\frac{{1}}{{{base}^{{{given}}}}}"),
        (f"1-\\frac{{1}}{{{base}^{{{exponent}}}}}", f"\\frac{{{base}^{{{given}}}-1}}{{{base}^{{{given}}}}}"),
        (f"e^{{-{exponent}}}", f"\\frac{{1}}{{e^{{{given}}}}}"),
        (f"{exponent}!", f"{given} \\cdot {given - 1}!"),
        (f"\\frac{{1}}{{{exponent}!}}", f"\\frac{{1}}{{{given} \\cdot {given - 1}!}}"),
        (f"\\binom{{{exponent}}}{{2}}", f"\\frac{{{given}\\cdot {given - 1}}}{{2}}"),
        (f"\\sqrt{{{base}}} \\cdot 10^{{-{exponent}}}", f"\\frac{{\\sqrt{{{base}}}}}{{10^{{{given}}}}}"),
    ])  # fmt: skip
    if base == above:
        return "1", "1.0", True
    return other, power, is_right


# --- roots, constants, expressions ---


def _root(draw: Draw, is_right: bool) -> Made:
    square_free, factor, below = draw.choice([2, 3, 5, 6, 7, 10, 11]), draw.randint(2, 9), draw.choice([1, 2, 3, 4])
    other = factor if is_right else factor + draw.choice([-1, 1])
    end = f"/{below}" if below > 1 else ""
    root = draw.choice(
        [
            f"\\sqrt{{{square_free}}}",
            f"\u221a{square_free}",
            f"\\sqrt {square_free}" if square_free < 10 else f"\\sqrt{{{square_free}}}",
        ]
    )
    given = draw.choice([
        f"{other}{root}{end}", f"\\frac{{{other}{root}}}{{{below}}}", f"\\frac{{{other}}}{{{below}}}{root}",
        f"\\frac{{\\sqrt{{{square_free * other * other}}}}}{{{below}}}",
        f"\\frac{{{other * square_free}}}{{{below}{root}}}" if below > 1 else f"\\frac{{{other * square_free}}}{{{root}}}",
    ])  # fmt: skip
    return given, f"\\frac{{\\sqrt{{{square_free * factor * factor}}}}}{{{below}}}", is_right


def _constant(draw: Draw, is_right: bool) -> Made:
    number, below = draw.randint(1, 20), draw.randint(2, 12)
    other = number if is_right else number + draw.choice([1, 2, -31])
    return draw.choice([
        (f"\\frac{{{other}\\pi}}{{{below}}}", f"{number}\\pi/{below}"),
        (f"\\frac{{{other}}}{{{below}}}\\pi", f"\\frac{{{number}\u03c0}}{{{below}}}"),
        (f"{other}\\ln {below}", f"\\ln({below}^{{{number}}})"),
        (f"\\log_2 {below} + {other}", f"\\log_{{2}}({below * 2**number})"),
        (f"e^{{{other}}}", f"e \\cdot e^{{{number - 1}}}"),
        (f"{other} + {below}i", f"{below}i + {number}"),
        (f"{other} - \\sqrt{{{below}}}", f"-\\sqrt{{{below}}} + {number}") if below not in (4, 9) else (f"{other}e", f"e\\cdot {number}"),
        (f"\\sqrt[3]{{{below}}} + {other}", f"{number} + {below}^{{1/3}}") if below != 8 else (f"{other}i", f"i\\cdot {number}"),
        (f"{other}\\sin 30^\\circ", f"\\frac{{{number}}}{{2}}"),
        (f"{other}\\cos(\\pi/3)", f"\\frac{{{number}}}{{2}}"),
        (f"\\lfloor {other}.5 \\rfloor" if other > 0 else f"{other}", f"{number}"),
        (f"|{-abs(other)}|", f"{number}"),
    ]) + (is_right,)  # fmt: skip


def _polynomial(draw: Draw, is_right: bool) -> Made:
    first, second = draw.randint(1, 9), draw.randint(1, 9)
    name = draw.choice(["x", "n", "a", "\\theta", "t"])
    total, product = first + second, first * second
    if not is_right:
        product += draw.choice([-1, 1, 2])
    power = f"{name}^2" if draw.random() < 0.7 else f"{name}^{{2}}"
    expanded = (
        f"{power}+{total}{name}+{product}" if not name.startswith("\\") else f"{power} + {total}{name} + {product}"
    )
    factored = draw.choice([f"({name}+{first})({name}+{second})", f"({name} + {second})\\cdot({name} + {first})"])
    given, truth = (expanded, factored) if draw.random() < 0.5 else (factored, expanded)
    if draw.random() < 0.3:
        given = f"f({name}) = {given}" if draw.random() < 0.5 else f"y = {given}"
    return given, truth, is_right


def _identity(draw: Draw, is_right: bool) -> Made:
    number = draw.randint(2, 9)
    right, wrong = draw.choice([
        (("\\sin 2x", "2\\sin x\\cos x"), ("\\sin 2x", "2\\sin x")),
        (("2^{n+1}", "2\\cdot 2^n"), ("2^{n+1}", "2^n+1")),
        (("|x|", "\\sqrt{x^2}"), ("x", "\\sqrt{x^2}")),
        (("n!", "n(n-1)!"), ("n!", "(n-1)!")),
        ((f"x^{{{number}}}", f"x\\cdot x^{{{number - 1}}}"), (f"x^{{{number}}}", f"x^{{{number + 1}}}")),
        ((f"\\frac{{x}}{{{number}}}", f"\\frac{{1}}{{{number}}}x"), (f"\\frac{{x}}{{{number}}}", f"\\frac{{{number}}}{{x}}")),
        ((f"{number}ab", f"{number}ba"), (f"{number}ab", f"{number}a+b")),
        (("x^{-1}", "\\frac{1}{x}"), ("x^{-1}", "-x")),
        (("\\frac{a}{b}+\\frac{b}{a}", "\\frac{a^2+b^2}{ab}"), ("\\frac{a}{b}+\\frac{b}{a}", "\\frac{a^2+b^2}{a+b}")),
        (("a^2-b^2", "(a-b)(a+b)"), ("a^2-b^2", "(a-b)^2")),
        (("\\binom{n}{2}", "\\frac{n(n-1)}{2}"), ("\\binom{n}{2}", "\\frac{n(n+1)}{2}")),
        (("x_1+x_2", "x_2+x_1"), ("x_1+x_2", "x_1-x_2")),
        (("-x", "(-1)\\cdot x"), ("-x", "x")),
        (("e^{x+y}", "e^x e^y"), ("e^{x+y}", "e^x+e^y")),
        (("\\sqrt{3+2\\sqrt{2}}", "1+\\sqrt{2}"), ("\\sqrt{3+2\\sqrt{2}}", "1+\\sqrt{3}")),
    ])  # fmt: skip
    given, truth = right if is_right else wrong
    if draw.random() < 0.5:
        given, truth = truth, given
    return given, truth, is_right


# --- several values ---


def _several(draw: Draw, count: int) -> list[str]:
    numbers = draw.sample(range(-30, 60), count)
    return [str(number) if draw.random() < 0.7 else f"\\frac{{{2 * number + 1}}}{{2}}" for number in numbers]


def _set(draw: Draw, is_right: bool) -> Made:
    wanted = _several(draw, draw.randint(2, 5))
    given = list(wanted)
    if not is_right:
        given = draw.choice([given[1:], [*given, "77"], [*given[1:], "88"]])
    draw.shuffle(given)
    braces = lambda items: "\\{" + ", ".join(items) + "\\}"
    forms = [braces(given), ", ".join(given), ",".join(given), "\\left\\{" + ",".join(given) + "\\right\\}"]
    if len(given) > 1:
        forms += [", ".join(given[:-1]) + " and " + given[-1], ", ".join(given[:-1]) + " \\text{ and } " + given[-1]]
        forms += [" or ".join(f"x={item}" for item in given), " \\text{ or } ".join(given), "; ".join(given)]
        forms.append("x \\in " + braces(given))
    return draw.choice(forms), draw.choice([braces(wanted), ", ".join(wanted), ",".join(wanted)]), is_right


def _boxes(draw: Draw, is_right: bool) -> Made:
    """Several boxes joined by "and" or commas are one answer; the response opens the first and closes the last."""
    wanted = _several(draw, 2)
    given = wanted if is_right else [wanted[0], "99"]
    join = draw.choice(["}$ and $\\boxed{", "}, \\boxed{", "} \\text{ and } \\boxed{", "}, and \\boxed{"])
    return f"{given[0]}{join}{given[1]}", ", ".join(wanted), is_right


def _tuple(draw: Draw, is_right: bool) -> Made:
    wanted = _several(draw, draw.randint(2, 4))
    given = wanted if is_right else [*wanted[1:], wanted[0]] if draw.random() < 0.5 else [*wanted[:-1], "91"]
    open_bracket, close = draw.choice([("(", ")"), ("\\left(", "\\right)"), ("( ", " )"), ("(\\,", "\\,)")])
    text = open_bracket + draw.choice([",", ", ", ",\\ "]).join(given) + close
    if len(given) == 2 and draw.random() < 0.3:
        text = f"(x,y) = {text}"
    return text, "(" + ", ".join(wanted) + ")", is_right


def _interval(draw: Draw, is_right: bool) -> Made:
    low, high = sorted(draw.sample(range(-20, 30), 2))
    left, right = draw.choice("(["), draw.choice(")]")
    signs = {
        "(": "<",
        "[": draw.choice(["\\le", "\\leq", "\\leqslant", "\u2264"]),
        ")": "<",
        "]": draw.choice(["\\le", "\\leq", "\u2264"]),
    }
    truth = f"{left}{low},{high}{right}"
    if not is_right:
        change = draw.randint(0, 2)
        low += change == 0
        high += change == 1
        if change == 2:
            left = "[" if left == "(" else "("
        if low == high:
            high += 5
    forms = [
        f"{left}{low}, {high}{right}", f"\\left{left}{low},{high}\\right{right}", f"x \\in {left}{low},{high}{right}",
        f"{low} {signs[left]} x {signs[right]} {high}", f"\\{{x \\mid {low} {signs[left]} x {signs[right]} {high}\\}}",
    ]  # fmt: skip
    flip = {"(": ">", "[": "\\ge", ")": ">", "]": "\\geq"}
    forms.append(f"{high} {flip[right]} x {flip[left]} {low}")
    answer = draw.choice(forms)
    return answer, truth, is_right


def _ray(draw: Draw, is_right: bool) -> Made:
    limit = draw.randint(-30, 30)
    other = limit if is_right else limit + draw.choice([-1, 1])
    return draw.choice([
        (f"x < {other}", f"(-\\infty, {limit})"), (f"x \\ge {other}", f"[{limit}, \\infty)"),
        (f"(-\\infty,{other}]", f"x \\le {limit}"), (f"{other} < x", f"({limit}, +\\infty)"),
        (f"x \\neq {other}", f"(-\\infty,{limit})\\cup({limit},\\infty)"),
        (f"\\mathbb{{R}} \\setminus \\{{{other}\\}}", f"x \\ne {limit}"),
        (f"x<{other} \\text{{ or }} x>{other + 3}", f"(-\\infty,{limit})\\cup({limit + 3},\\infty)"),
        (f"({other},{other + 2})\\cup[{other + 2},{other + 9})", f"({limit},{limit + 9})"),
        (f"x > {other} \\text{{ and }} x \\le {other + 4}", f"({limit},{limit + 4}]"),
        (f"2x < {2 * other}", f"x < {limit}"), (f"\\{{x : x > {other}\\}}", f"({limit},\\infty)"),
    ]) + (is_right,)  # fmt: skip


def _equation(draw: Draw, is_right: bool) -> Made:
    slope, shift, factor = draw.randint(2, 9), draw.randint(1, 9), draw.randint(2, 5)
    other = shift if is_right else shift + 1
    return draw.choice([
        (f"y = {slope}x + {other}", f"y={slope}x+{shift}"), (f"{slope}x - y + {other} = 0", f"y = {slope}x + {shift}"),
        (f"{factor}x^2 + {factor}y^2 = {factor * other}", f"x^2+y^2={shift}"), (f"y - {other} = {slope}x", f"y = {slope}x+{shift}"),
        (f"x = {other}, y = {slope}", f"x={shift}, y={slope}"), (f"y = {slope}, x = {other}", f"x = {shift}, y = {slope}"),
        (f"a = {other}", f"{shift}"), (f"{other}", f"k = {shift}"),
    ]) + (is_right,)  # fmt: skip


def _matrix(draw: Draw, is_right: bool) -> Made:
    rows = [[draw.randint(-9, 9) for _ in range(2)] for _ in range(draw.randint(1, 3))]
    other = [list(row) for row in rows]
    if not is_right:
        other[-1][draw.randint(0, 1)] += 1
    name = draw.choice(["pmatrix", "bmatrix"])
    write = lambda each, name, sep: (
        f"\\begin{{{name}}}" + sep.join(" & ".join(map(str, row)) for row in each) + f"\\end{{{name}}}"
    )
    return write(other, name, " \\\\ "), write(rows, "pmatrix", "\\\\"), is_right


def _sign(draw: Draw, is_right: bool) -> Made:
    number, root = draw.randint(1, 20), draw.choice([2, 3, 5])
    other = number if is_right else number + 1
    return draw.choice([
        (f"\\pm {other}", f"\\{{{number}, -{number}\\}}"), (f"x = \\pm {other}", f"-{number}, {number}"), (f"\u00b1{other}", f"\\pm {number}"),
        (f"{other} \\pm \\sqrt{{{root}}}", f"{number}+\\sqrt{{{root}}}, {number}-\\sqrt{{{root}}}"),
        (f"\\frac{{{other} \\pm \\sqrt{{{root}}}}}{{2}}", f"\\left\\{{\\frac{{{number}-\\sqrt{{{root}}}}}{{2}}, \\frac{{{number}+\\sqrt{{{root}}}}}{{2}}\\right\\}}"),
    ]) + (is_right,)  # fmt: skip


# --- what is no value ---


def _words(draw: Draw, is_right: bool) -> Made:
    words = ["Evelyn", "Monday", "even", "yes", "increasing", "isosceles triangle", "blue", "no solution", "Alice"]
    wanted, other = draw.sample(words, 2)
    given = wanted if is_right else other
    return (
        draw.choice(
            [
                f"\\text{{{given}}}",
                given,
                f"\\text{{{given}}}.",
                f"\\textbf{{{given}}}",
                given.capitalize(),
                f"**{given}**",
            ]
        ),
        draw.choice([wanted, f"\\text{{{wanted}}}", f"{wanted}."]),
        is_right,
    )


def _letters(draw: Draw, is_right: bool) -> Made:
    """An order of letters is no product."""
    letters = draw.sample("ABCDEFGH", draw.randint(2, 5))
    other = letters if is_right else letters[1:] + letters[:1]
    return (
        draw.choice(["{}", "\\text{{{}}}", "{}.", "\\mathrm{{{}}}"]).format("".join(other)),
        "".join(letters),
        is_right,
    )


def _percent(draw: Draw, is_right: bool) -> Made:
    number = draw.choice([draw.randint(1, 99), Fraction(draw.randint(1, 199), 2)])
    value = Fraction(number) if is_right else Fraction(number) + draw.choice([1, Fraction(1, 2)])
    text, given = _decimal_text(Fraction(number)), _decimal_text(value)
    return draw.choice([
        (f"{given}\\%", text), (given, f"{text}\\%"), (f"{given}%", f"{text}\\%"), (f"{given} \\%", _decimal_text(Fraction(number) / 100)),
        (_decimal_text(value / 100), f"{text}\\%"),
    ]) + (is_right,)  # fmt: skip


def _base(draw: Draw, is_right: bool) -> Made:
    digits, base = "".join(draw.choice("01") for _ in range(4)).lstrip("0") or "1", draw.choice([2, 3, 5, 8])
    if is_right:
        return draw.choice([f"{digits}_{base}", f"{digits}_{{{base}}}", digits]), f"{digits}_{{{base}}}", True
    return draw.choice([f"{digits}_{{{base + 1}}}", f"{digits}1_{base}"]), f"{digits}_{base}", False


def _ratio(draw: Draw, is_right: bool) -> Made:
    first, second, factor = draw.randint(1, 9), draw.randint(10, 20), draw.randint(2, 4)
    other = first if is_right else first + 1
    return (
        draw.choice(
            [
                f"{other}:{second}",
                f"{other} : {second}",
                f"{other}\uff1a{second}",
                f"{other * factor}:{second * factor}",
            ]
        ),
        f"{first}:{second}",
        is_right,
    )


def _unit(draw: Draw, is_right: bool) -> Made:
    number = draw.randint(1, 900)
    unit, other = draw.sample(["cm", "m", "km", "ft", "hours", "minutes", "kg", "g"], 2)
    long = {"cm": "centimeters", "m": "meters", "km": "kilometers", "ft": "feet", "kg": "kilograms", "g": "grams"}
    write = lambda name: draw.choice(
        [f"{number}\\text{{ {name}}}", f"{number} \\mathrm{{{name}}}", f"{number}\\,\\text{{{long.get(name, name)}}}"]
    )
    return write(unit if is_right else other), write(unit), is_right


_MAKERS: dict[str, Callable[[Draw, bool], Made]] = {
    "integer": _integer, "rational": _rational, "rounded": _rounded, "too coarse": _too_coarse, "scientific": _scientific,
    "power": _power, "root": _root, "constant": _constant, "polynomial": _polynomial, "identity": _identity, "set": _set,
    "boxes": _boxes, "tuple": _tuple, "interval": _interval, "ray": _ray, "equation": _equation, "matrix": _matrix,
    "sign": _sign, "words": _words, "letters": _letters, "percent": _percent, "base": _base, "ratio": _ratio, "unit": _unit,
}  # fmt: skip
