"""The needle stands where it should, fits, and its key is scored from what is stored."""

import pytest
import torch
from checkpoint_kinds import TOKENIZER
from conftest import TINY

import needle
from engine import Engine
from kv_cache import make_caches
from needle import FILLER, QUESTION, Found, find, hidden_in, hide, keys, length, lost
from scoring import Stream
from tokenizer import open_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, data in TOKENIZER.hf_files.items():
        (folder / name).write_bytes(data)
    return open_tokenizer(folder)


@pytest.fixture(scope="module")
def encode(tokenizer):
    return tokenizer.encode


def stream(model, name="fp32") -> Stream:
    caches = make_caches(TINY, (name, name), 1, 512)
    return Stream(engine=Engine(model, caches, compile=False), score_width=16)


def test_keys_are_digits_that_the_seed_decides():
    first = keys(20, seed=1)
    assert first == keys(20, seed=1) != keys(20, seed=2)
    assert keys(3, seed=1) == first[:3]
    assert len(set(first)) == 20
    assert all(len(key) == 5 and key.isdecimal() for key in first)


@pytest.mark.parametrize("place", [0, 10, 50, 90, 100, None])
@pytest.mark.parametrize("context", [500, 1234, 2000])
def test_the_text_is_as_long_as_it_may_be_and_holds_the_needle_at_its_place(
    context, place, tokenizer
):
    text = hide(tokenizer.encode, "31415", context, place)
    one_more = len(tokenizer.encode(FILLER)) - 1
    assert context - one_more < length(text) <= context
    assert tokenizer.decode(text.key_ids) == " 31415"
    shown = tokenizer.decode(text.ids)
    assert shown.endswith("\n" + QUESTION)
    assert shown.count("31415") == (0 if place is None else 2)
    if place is not None:
        filler_before = shown.index("The locker number is 31415") / len(FILLER)
        assert filler_before == int(filler_before)  # whole repeats
        assert abs(filler_before / shown.count(FILLER) - place / 100) <= 0.5 / shown.count(FILLER)


def test_a_text_too_short_for_the_needle_is_none(encode):
    smallest = length(hidden_in(encode, "31415", 0, 50))
    assert hide(encode, "31415", smallest, 50) is not None
    assert hide(encode, "31415", smallest - 1, 50) is None


def test_texts_without_the_needle_are_the_same_for_all_keys(encode):
    first, second = (hide(encode, key, 900, None) for key in ("11111", "22222"))
    assert torch.equal(first.ids, second.ids)
    assert not torch.equal(first.key_ids, second.key_ids)


def test_ids_where_text_and_key_share_a_token_belong_to_the_key():
    def joins_pairs(text: str) -> list[int]:  # two characters a token
        return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]

    text = hidden_in(joins_pairs, "31415", 0, None)
    whole = joins_pairs(f"{QUESTION} 31415")
    assert text.ids.tolist() + text.key_ids.tolist() == whole
    assert len(QUESTION) % 2 == 1  # so that the blank and its last letter are one token
    assert len(text.key_ids) == 4


@pytest.mark.parametrize("place", [50, None])
def test_the_nll_of_the_key_is_that_of_one_pass(place, tiny_model, encode):
    text = hide(encode, "31415", 400, place)
    ids = torch.cat((text.ids, text.key_ids))
    caches = make_caches(TINY, ("fp32", "fp32"), 1, 512)
    x = tiny_model(ids[None], torch.zeros(1, dtype=torch.long), caches, past_len=0)
    logits = tiny_model.logits(x[0, len(text.ids) - 1 : -1])
    expected = torch.nn.functional.cross_entropy(logits, text.key_ids, reduction="sum")
    assert find(stream(tiny_model), text).nll == pytest.approx(expected.item(), rel=1e-5)


def test_the_key_is_read_from_the_cache_as_stored(tiny_model, encode):
    text = hide(encode, "31415", 400, 50)
    plain, stored = (find(stream(tiny_model, name), text).nll for name in ("fp32", "int8"))
    assert 1e-6 < abs(plain - stored) < 0.5


def test_a_key_is_found_when_each_of_its_ids_is_the_likeliest(tiny_model, encode):
    text = hide(encode, "31415", 400, 50)
    each = stream(tiny_model)
    assert not find(each, text).is_exact
    likeliest = []
    for _ in range(3):
        ids = torch.cat((text.ids, torch.tensor(likeliest, dtype=torch.long)))
        likeliest.append(int(each.engine.prefill(ids[None]).argmax()))
    assert find(each, needle.Hidden(text.ids, torch.tensor(likeliest))).is_exact
    likeliest[-1] = (likeliest[-1] + 1) % TINY.vocab_size
    assert not find(each, needle.Hidden(text.ids, torch.tensor(likeliest))).is_exact


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_a_text_that_is_stored_is_not_read_again(name, tiny_model, encode, monkeypatch):
    first, second = (hide(encode, key, 400, None) for key in ("31415", "27182"))
    fresh = find(stream(tiny_model, name), second)
    each = stream(tiny_model, name)
    find(each, first)
    monkeypatch.setattr(Stream, "prefill", None)
    assert find(each, second, is_stored=True) == fresh


def test_a_key_is_lost_only_if_the_reference_finds_it():
    found = [Found(1.0, is_exact) for is_exact in (True, True, False, False)]
    found_ref = [Found(1.0, is_exact) for is_exact in (True, False, True, False)]
    assert lost(found, found_ref) == 1
