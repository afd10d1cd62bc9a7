from __future__ import annotations

from operator import itemgetter, neg

import pytest

from moequant.selftest.pool import Died, run_apart


def results_of(function, arguments, processes):
    return sorted(run_apart(function, arguments, processes), key=itemgetter(0))


def test_every_argument_gets_its_result():
    assert results_of(neg, [5, 6, 7], 2) == [(0, -5), (1, -6), (2, -7)]
    assert results_of(neg, [], 2) == []


def test_a_process_that_dies_costs_the_result_of_its_argument_alone():
    died, fine = results_of(eval, ["__import__('os')._exit(1)", "3 * 7"], 1)
    assert isinstance(died[1], Died)
    assert fine == (1, 21)


def test_an_exception_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        results_of(eval, ["1 / 0"], 1)
