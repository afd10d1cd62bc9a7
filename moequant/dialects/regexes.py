"""Regular expressions from untrusted files; those that could match for hours are refused.

`re` backtracks, and the number of ways it tries is unbounded: `(.*.*)*X` takes longer than a
lifetime for a name of 60 letters. So an upper bound of the ways is computed from the pattern.

RE2, which does not backtrack, does not support look-aheads, which released configs have in `ignore`
and moequant writes into targets. A length limit would not help either: that pattern has eight
characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# A character, a class or an escape has no name here: they are taken alike.
_TOKEN = re.compile(
    r"""
      (?P<comment> \(\?\# [^)]* \) )
    | (?P<verbose> \(\? [a-zA-Z]* x )
    | (?P<reference> \\[1-9] | \(\?P= )
    | (?P<open> \( (?:
          \? (?: P<\w+> | <?[=!] | [:>] | \(\w+\) | [a-zA-Z]*-?[a-zA-Z]*:? )
      )? )
    | (?P<close> \) )
    | (?P<alternative> \| )
    | (?P<repeat> (?:
          (?P<endless> [*+] | \{ [0-9]*, \} ) | \? | \{ (?: [0-9]*, )? (?P<most> [0-9]+ ) \}
      ) [?+]? )
    | \\. | \[ \^? \]? (?: \\. | [^\]\\] )* \] | .
    """,
    re.DOTALL | re.VERBOSE,
)
# What an endless repetition counts for; real patterns have up to four of them.
_ENDLESS = 16
_MOST_WAYS = 4 * _ENDLESS**4
_TOO_MANY = _MOST_WAYS + 1


def compile_regex(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression that may be hostile.

    Raises:
        ValueError: it is none, or could match in too many ways.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern[:80]!r} is no regular expression ({error})") from None
    if _count_ways(pattern) > _MOST_WAYS:
        raise ValueError(
            f"{pattern[:80]!r} could match a name in so many ways that it takes hours; use "
            "at most 4 of *, + and {n,}, none around another repetition or |, few of ? and |, no "
            "reference to a group and no (?x), or write several simple ones"
        )
    return compiled


@dataclass(slots=True)
class _Group:
    """Ways through an open group: its former alternatives, the present one, and its last item."""

    former: int = 0
    present: int = 1
    last: int = 1

    def add(self, item: int) -> None:
        self.present, self.last = min(self.present * self.last, _TOO_MANY), item

    def repeat(self, most: int | None) -> None:
        if most is None:
            self.last = _ENDLESS if self.last == 1 else _TOO_MANY
        else:
            # Where there is a choice, 64 times are as good as any more.
            self.last = min((most + 1) * self.last ** min(most, 64), _TOO_MANY)

    def end_alternative(self) -> None:
        self.former = self.ways()
        self.present = self.last = 1

    def ways(self) -> int:
        return min(self.former + self.present * self.last, _TOO_MANY)


def _count_ways(pattern: str) -> int:
    """The ways in which a valid pattern may match, at most; or _TOO_MANY."""
    groups = [_Group()]
    for token in _TOKEN.finditer(pattern):
        match token.lastgroup:
            case "comment":
                pass  # A following quantifier applies to what is before it.
            case "reference":
                return _TOO_MANY  # The text it refers to is compared each time.
            case "verbose":
                return _TOO_MANY  # Its comments may hide anything.
            case "open":
                groups.append(_Group())
            case "close":
                ways = groups.pop().ways()
                groups[-1].add(ways)
            case "alternative":
                groups[-1].end_alternative()
            case "repeat":
                most = int(token["most"] or 1)
                groups[-1].repeat(None if token["endless"] else most)
            case _:
                groups[-1].add(1)
    return groups[0].ways()
