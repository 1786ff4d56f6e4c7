"""As much of Prometheus as our alert rules and panels use: scrapes, and the value of an expression over two of them.

A range is taken to span both scrapes: `increase` is their difference, `rate` that by the seconds of the range. Checked
against the real `promtool` where it is installed.
"""

from __future__ import annotations

import operator
import re
import urllib.request
from collections.abc import Callable, Mapping

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Scrape = dict[str, Vector]

_TOKEN = re.compile(
    r'\s*(?:(?P<number>\d+(?:\.\d+)?)(?![\w])|(?P<word>[a-zA-Z_:][\w:]*)|(?P<text>"[^"]*")|(?P<range>\[[^\]]*\])'
    r"|(?P<mark>==|!=|>=|<=|=~|[-+*/<>(){},=]))"
)
_ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "*": operator.mul,
    "/": lambda a, b: a / b if b else float("nan"),
    "+": operator.add,
    "-": operator.sub,
}
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
}
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_AGGREGATES: Mapping[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}
_FUNCTIONS = ("increase", "rate", "min_over_time", "absent", "histogram_quantile")


def read(text: str, instance: str) -> Scrape:
    """What was scraped from one target, with the label that Prometheus gives it."""
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset({**sample.labels, "instance": instance}.items())
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def scrape(*urls: str) -> Scrape:
    """Everything that these addresses say now; one that does not answer is left out, as in Prometheus."""
    found: Scrape = {}
    for url in urls:
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310 (our own loopback)
                text = answer.read().decode()
        except OSError:
            continue
        for name, vector in read(text, url).items():
            found.setdefault(name, {}).update(vector)
    return found


def names(expression: str) -> dict[str, set[str]]:
    """Metrics that an expression asks for, with the labels it selects them by."""
    asked: dict[str, set[str]] = {}
    for name, chosen in re.findall(r"(adaptersync_\w+)(?:\{([^}]*)\})?", expression):
        asked.setdefault(name, set()).update(re.findall(r"(\w+)\s*=", chosen))
    return asked


def value(expression: str, before: Scrape, now: Scrape) -> Vector:
    """The series an expression has; none: an alert with it does not fire."""
    parser = _Parser(expression, before, now)
    result = parser.either()
    assert parser.at == len(parser.tokens), f"not understood from {parser.tokens[parser.at :]} on: {expression}"
    assert isinstance(result, dict)
    return {labels: number for labels, number in result.items() if number == number}


class _Parser:
    def __init__(self, expression: str, before: Scrape, now: Scrape) -> None:
        self.before, self.now, self.at = before, now, 0
        self.tokens: list[tuple[str, str]] = []
        place, expression = 0, expression.strip()
        while place < len(expression):
            found = _TOKEN.match(expression, place)
            assert found, f"not understood: {expression[place:]}"
            kind = str(found.lastgroup)
            self.tokens.append((kind, found[kind]))
            place = found.end()

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.peek()
        assert token, f"wanted {wanted or 'more'}"
        assert wanted in ("", token), f"wanted {wanted}, found {token!r}"
        self.at += 1
        return token

    def either(self) -> Vector | float:
        left = self.both()
        while self.peek() == "or":
            self.take()
            right = self.both()
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            left = right | left
        return left

    def both(self) -> Vector | float:
        left = self.compared()
        while self.peek() == "and":
            self.take()
            right = self.compared()
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            left = {labels: number for labels, number in left.items() if labels in right}
        return left

    def compared(self) -> Vector | float:
        left = self.added()
        while self.peek() in _COMPARED:
            holds, right = _COMPARED[self.take()], self.added()
            assert isinstance(left, dict)
            other = right if isinstance(right, dict) else dict.fromkeys(left, right)
            left = {each: number for each, number in left.items() if each in other and holds(number, other[each])}
        return left

    def added(self) -> Vector | float:
        left = self.one()
        while self.peek() in _ARITHMETIC:
            of, right = _ARITHMETIC[self.take()], self.one()
            if isinstance(left, dict) and isinstance(right, dict):
                left = {each: of(number, right[each]) for each, number in left.items() if each in right}
            elif isinstance(left, dict):
                assert not isinstance(right, dict)
                left = {each: of(number, right) for each, number in left.items()}
            elif isinstance(right, dict):
                left = {each: of(left, number) for each, number in right.items()}
            else:
                left = of(left, right)
        return left

    def one(self) -> Vector | float:
        kind, token = self.tokens[self.at]
        if kind == "number":
            self.take()
            return float(token)
        if token == "(":
            self.take()
            inner = self.either()
            self.take(")")
            return inner
        self.take()
        if token in _AGGREGATES:
            by: set[str] = set()
            if self.peek() == "by":
                self.take()
                self.take("(")
                while self.peek() != ")":
                    if self.take() != ",":
                        by.add(self.tokens[self.at - 1][1])
                self.take(")")
            self.take("(")
            inner = self.either()
            self.take(")")
            return self.aggregated(token, by, inner)
        if token in _FUNCTIONS:
            return self.called(token)
        return self.selected(token)

    def aggregated(self, name: str, by: set[str], inner: Vector | float) -> Vector:
        assert isinstance(inner, dict)
        groups: dict[Labels, list[float]] = {}
        for labels, number in inner.items():
            groups.setdefault(frozenset((key, told) for key, told in labels if key in by), []).append(number)
        return {labels: _AGGREGATES[name](numbers) for labels, numbers in groups.items()}

    def called(self, name: str) -> Vector:
        self.take("(")
        if name == "histogram_quantile":
            share = float(self.take())
            self.take(",")
            inner = self.either()
            self.take(")")
            assert 0 < share < 1
            assert isinstance(inner, dict)
            return {frozenset((key, told) for key, told in labels if key != "le"): share for labels in inner}
        if name == "absent":
            inner = self.either()
            self.take(")")
            return {} if inner else {frozenset(): 1.0}
        begun = self.at
        now = self.either()
        end, self.at = self.at, begun
        self.before, self.now = self.now, self.before
        before = self.either()
        self.before, self.now = self.now, self.before
        assert self.at == end
        spanned = self.take()
        assert spanned.startswith("["), f"{name} wants a range"
        self.take(")")
        assert isinstance(now, dict)
        assert isinstance(before, dict)
        if name == "min_over_time":
            return {labels: min(number, before.get(labels, number)) for labels, number in now.items()}
        seconds = 1.0
        if name == "rate":
            found = re.fullmatch(r"\[(\d+)([smh])\]", spanned)
            seconds = float(found[1]) * _SECONDS[found[2]] if found else 60.0
        # a series that is in one scrape only has no growth: that is why ours begin at zero
        return {each: (number - before[each]) / seconds for each, number in now.items() if each in before}

    def selected(self, name: str) -> Vector:
        wanted: dict[str, str] = {}
        if self.peek() == "{":
            self.take()
            while self.peek() != "}":
                label = self.take()
                self.take("=")
                wanted[label] = self.take().strip('"')
                if self.peek() == ",":
                    self.take()
            self.take("}")
        found = self.now.get(name, {})
        return {labels: number for labels, number in found.items() if wanted.items() <= dict(labels).items()}
