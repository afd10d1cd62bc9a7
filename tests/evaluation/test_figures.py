"""The figures are what llama.cpp defines, computed here one by one in Python's own float64."""

from __future__ import annotations

import math

import pytest
import torch

from moequant.evaluation.figures import Ratio, figures_of, kl_ratio
from moequant.evaluation.predictions import Predictions, compare

W, S, V = 5, 30, 41
# Sums of V float64 terms and a logarithm of each sum: below 2 V rounding errors of 2**-53, relative
# to the largest term, which is below 40 in nats here.
ABSOLUTE = 2 * V * 40 * 2**-53


def logits(seed, spread):
    return spread * torch.randn(W, S, V, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def both():
    reference = logits(1, 2.0)
    ids = torch.randint(V, (W, S), generator=torch.Generator().manual_seed(3))
    return reference, reference + logits(2, 0.3), ids


def log_probabilities(row):
    """ln of the softmax of a list."""
    largest = max(row)
    total = math.log(math.fsum(math.exp(x - largest) for x in row))
    return [x - largest - total for x in row]


def llama_percentile(values, share):
    """llama.cpp's percentile: linear between the two values next to share * (n - 1)."""
    ordered = sorted(values)
    if share == 0.5:  # kld_median: the mean of the two in the middle, or the one
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle] + ordered[middle - 1]) / 2
    place = share * (len(ordered) - 1)
    below = int(place)
    if below + 1 == len(ordered):
        return ordered[below]
    weight = place - below
    return (1 - weight) * ordered[below] + weight * ordered[below + 1]


def straightforward(reference, test, ids):
    """KL and same top by position, and both negative log-likelihoods, of Python numbers."""
    kl, nll_reference, nll_test, same = [], [], [], []
    for r_rows, t_rows, tokens in zip(reference, test, ids, strict=True):
        for place, (r, t) in enumerate(zip(r_rows, t_rows, strict=True)):
            p, q = log_probabilities(r), log_probabilities(t)
            kl.append(math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
            same.append(p.index(max(p)) == q.index(max(q)))
            if place + 1 < len(tokens):
                nll_reference.append(-p[tokens[place + 1]])
                nll_test.append(-q[tokens[place + 1]])
    return kl, nll_reference, nll_test, same


def test_figures_are_those_of_llama_cpp(both):
    reference, test, ids = both
    parts = [compare(r, t, i) for r, t, i in zip(reference, test, ids, strict=True)]
    found = figures_of(Predictions.join(parts), sections=[0, 0, 1, 1, 1])
    kl, nll_reference, nll_test, same = straightforward(
        reference.double().tolist(), test.double().tolist(), ids.tolist()
    )

    def near(value):
        return pytest.approx(value, abs=ABSOLUTE, rel=1e-13)

    assert found.positions == len(kl) == W * S
    assert found.kl_mean == near(math.fsum(kl) / len(kl))
    assert found.kl_median == near(llama_percentile(kl, 0.5))
    assert found.kl_99 == near(llama_percentile(kl, 0.99))
    assert found.kl_999 == near(llama_percentile(kl, 0.999))
    assert found.kl_max == near(max(kl))
    assert found.same_top == near(sum(same) / len(same))
    assert 0 < sum(same) < len(same)
    mean_reference = math.fsum(nll_reference) / len(nll_reference)
    mean_test = math.fsum(nll_test) / len(nll_test)
    assert found.perplexity_reference == near(math.exp(mean_reference))
    assert found.perplexity == near(math.exp(mean_test))
    assert found.nll_difference == near(mean_test - mean_reference)
    windows = [math.fsum(kl[S * w : S * (w + 1)]) / S for w in range(W)]
    assert found.kl_by_window == near(windows)
    mean = sum(windows) / W
    error = math.sqrt(sum((x - mean) ** 2 for x in windows) / (W - 1) / W)
    assert found.kl_mean_se == near(error)
    first, second = found.sections
    assert (first.section, first.windows, second.section, second.windows) == (0, 2, 1, 3)
    assert second.kl_mean == near(sum(windows[2:]) / 3)
    rest = nll_test[2 * (S - 1) :]
    assert second.perplexity == near(math.exp(math.fsum(rest) / len(rest)))


def test_the_same_logits_have_no_divergence(both):
    reference, _, ids = both
    found = figures_of(compare(reference[0], reference[0], ids[0]), sections=[0])
    assert (found.kl_mean, found.kl_max, found.same_top) == (0.0, 0.0, 1.0)
    assert found.perplexity == found.perplexity_reference
    # One window has no standard error.
    assert found.kl_mean_se is found.nll_difference_se is found.sections[0].kl_mean_se is None


def figures(*kl_by_window):
    kl = torch.tensor(kl_by_window, dtype=torch.float64)[:, None]
    same, nll = torch.ones_like(kl, dtype=torch.bool), torch.ones_like(kl)
    found = Predictions(kl=kl, nll_reference=nll, nll_test=nll, same_top=same)
    return figures_of(found, sections=[0] * len(kl))


def test_the_ratio_of_two_tests_is_paired_by_window():
    one, other = (0.3, 0.2, 0.5), (0.6, 0.5, 0.9)
    found = kl_ratio(figures(*one), figures(*other))
    assert found.ratio == pytest.approx(1.0 / 2.0)
    # Each window left out once.
    ratios = [0.7 / 1.4, 0.8 / 1.5, 0.5 / 1.1]
    mean = sum(ratios) / 3
    assert found.se == pytest.approx(math.sqrt(2 / 3 * sum((r - mean) ** 2 for r in ratios)))
    # Proportional windows have one ratio, however much they differ.
    assert kl_ratio(figures(0.1, 0.4), figures(0.2, 0.8)) == Ratio(
        ratio=pytest.approx(0.5), se=pytest.approx(0.0, abs=1e-12)
    )


def test_a_ratio_needs_a_divergence_and_its_error_two_windows():
    assert kl_ratio(figures(0.1, 0.2), figures(0.0, 0.0)) is None
    assert kl_ratio(figures(0.1), figures(0.2)) == Ratio(ratio=0.5, se=None)
    assert kl_ratio(figures(0.1, 0.1), figures(0.2, 0.0)) == Ratio(ratio=1.0, se=None)


def test_chunks_of_a_large_vocabulary_change_nothing(monkeypatch, both):
    reference, test, ids = both
    whole = compare(reference[0], test[0], ids[0])
    monkeypatch.setattr("moequant.evaluation.predictions.CHUNK_BYTES", 7 * 8 * V)
    parts = compare(reference[0], test[0], ids[0])
    for name in ("kl", "nll_reference", "nll_test", "same_top"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
