from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from operator import itemgetter, neg

import pytest

from moequant.selftest.pool import Died, run_apart


def results_of(function, arguments, processes, *, limit_s=60):
    return sorted(run_apart(function, arguments, processes, limit_s=limit_s), key=itemgetter(0))


def test_every_argument_gets_its_result():
    assert results_of(neg, [5, 6, 7], 2) == [(0, -5), (1, -6), (2, -7)]
    assert results_of(neg, [], 2) == []


def test_a_process_that_dies_costs_the_result_of_its_argument_alone():
    died, fine = results_of(eval, ["__import__('os')._exit(1)", "3 * 7"], 1)
    assert died == (0, Died(in_time=True))
    assert fine == (1, 21)


def test_a_process_that_hangs_is_ended_and_costs_the_result_of_its_argument_alone(capfd):
    hangs, fine = results_of(eval, ["__import__('time').sleep(600)", "3 * 7"], 1, limit_s=1)
    assert hangs == (0, Died(in_time=False))
    assert fine == (1, 21)
    assert "Timeout (0:00:01)!" in capfd.readouterr().err  # and where it was


def test_the_limit_is_that_of_each_argument():
    found = results_of(eval, ["__import__('time').sleep(0.4)"] * 4, 1, limit_s=1.5)
    assert found == [(i, None) for i in range(4)]


def test_a_pool_that_breaks_while_it_is_filled_costs_no_result(monkeypatch):
    submit, given = ProcessPoolExecutor.submit, []

    def break_at_the_second(pool, function, argument):
        given.append(argument)
        if len(given) == 2:
            raise BrokenProcessPool
        return submit(pool, function, argument)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", break_at_the_second)
    assert results_of(neg, [5, 6], 1) == [(0, -5), (1, -6)]


def test_an_exception_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        results_of(eval, ["1 / 0"], 1)
