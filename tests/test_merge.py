import pytest
import torch

from kernels.merge import merge_partials


def attention(scores, values):
    """fp64 oracle over [R, N] scores and [N, D] values."""
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("cut", [1, 7, 63])
def test_merging_two_halves_equals_attention_over_all(cut):
    torch.manual_seed(0)
    scores, values = 9 * torch.randn(5, 64, dtype=torch.double), torch.randn(64, 8).double()
    a = attention(scores[:, :cut], values[:cut])
    b = attention(scores[:, cut:], values[cut:])
    out, lse = merge_partials(a, b)
    expected_out, expected_lse = attention(scores, values)
    torch.testing.assert_close(out, expected_out.float(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("filler", [torch.nan, torch.inf, 0.0])
def test_an_empty_partial_changes_nothing_whatever_its_out_holds(filler):
    out, lse = torch.randn(3, 8), torch.randn(3)
    empty = torch.full((3, 8), filler), torch.full((3,), -torch.inf)
    for merged in (merge_partials((out, lse), empty), merge_partials(empty, (out, lse))):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


def test_a_bad_partial_spoils_the_merge():
    good = torch.randn(3, 8), torch.randn(3)
    empty = torch.zeros(3, 8), torch.full((3,), -torch.inf)
    bad = torch.full((3, 8), torch.nan)
    for lse in (torch.full((3,), torch.nan), torch.zeros(3)):
        for other in (good, empty):
            for pair in (((bad, lse), other), (other, (bad, lse))):
                assert merge_partials(*pair)[0].isnan().all()


def test_two_empty_partials_are_empty():
    empty = torch.full((3, 8), torch.nan), torch.full((3,), -torch.inf)
    out, lse = merge_partials(empty, empty)
    assert torch.equal(out, torch.zeros(3, 8))
    assert torch.equal(lse, torch.full((3,), -torch.inf))


def test_merge_does_not_depend_on_the_order():
    torch.manual_seed(1)
    a, b = (torch.randn(4, 8), torch.randn(4)), (torch.randn(4, 8), 30 * torch.randn(4))
    for one, other in zip(merge_partials(a, b), merge_partials(b, a), strict=True):
        assert torch.equal(one, other)
