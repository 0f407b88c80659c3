import dataclasses

import pytest
import torch
from attention_case import use_reference, use_tiles
from conftest import TINY, seeded_model
from plain_llama import full_forward, greedy
from torch._dynamo.utils import counters

from engine import Engine, Sampling, generate, sample
from kv_cache import make_caches

GREEDY = Sampling(320, temperature=0)
PROMPT = torch.randint(0, 320, (1, 21), generator=torch.Generator().manual_seed(5)).tolist()[0]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield


def make_engine(model, kv_format="fp32", *, compile=False, cache_len=256, chunk=2048, device="cpu"):
    caches = make_caches(model.config, (kv_format, kv_format), 1, cache_len, device)
    return Engine(model.to(device), caches, compile=compile, prefill_chunk=chunk)


def generated(engine, prompt, count, sampling=GREEDY, **keywords):
    prompt = torch.tensor([prompt], device=engine.device)
    tokens = generate(engine, prompt, count, sampling, **keywords)
    return [int(token) for token in tokens]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_ids_equal_a_full_forward_loop_without_cache(compile, tied):
    model = seeded_model(dataclasses.replace(TINY, tie_embeddings=tied))
    engine = make_engine(model, compile=compile)
    assert generated(engine, PROMPT, 64) == greedy(model, PROMPT, 64)


def teacher_forced_logits(engine, ids, prompt_len):
    """Logits [N, V] after prompt_len ids and after each further one, by decode steps."""
    logits = [engine.prefill(torch.tensor([ids[:prompt_len]]))]
    with torch.inference_mode():
        for position in range(prompt_len, len(ids)):
            token = torch.tensor([[ids[position]]])
            x = engine.model(token, torch.tensor([position]), engine.caches)
            logits.append(engine.model.logits(x[:, -1]))
    return torch.cat(logits)


def test_an_int8_cache_costs_little_and_not_nothing(tiny_model, record_property):
    ids = PROMPT + greedy(tiny_model, PROMPT, 64)
    logits = teacher_forced_logits(make_engine(tiny_model, "int8"), ids, len(PROMPT))
    expected = full_forward(tiny_model, ids)[len(PROMPT) - 1 :].float()
    log_p, log_q = expected.log_softmax(-1), logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    error = (logits - expected).abs().amax(-1)
    record_property("int8 max logit error", error.max().item())
    record_property("int8 mean KL", kl.mean().item())
    assert error[0] < 1e-4  # the prompt was one chunk: exact
    assert 1e-3 < error[1:].max() < 0.2
    assert 1e-7 < kl[1:].mean() < 1e-3


def test_a_full_precision_cache_costs_nothing(tiny_model):
    ids = PROMPT + greedy(tiny_model, PROMPT, 32)
    logits = teacher_forced_logits(make_engine(tiny_model), ids, len(PROMPT))
    expected = full_forward(tiny_model, ids)[len(PROMPT) - 1 :].float()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_format", ["fp32", "int8", "int4", "fp8"])
def test_compiled_ids_equal_eager_ids(kv_format, tiny_model):
    eager = generated(make_engine(tiny_model, kv_format), PROMPT, 100)
    assert generated(make_engine(tiny_model, kv_format, compile=True), PROMPT, 100) == eager
    assert len(set(eager)) > 10


def test_sampled_ids_depend_on_the_seed_and_not_on_compilation(tiny_model):
    sampling = Sampling(320, temperature=0.9, top_k=50)
    eager = [generated(make_engine(tiny_model), PROMPT, 40, sampling, seed=s) for s in (1, 1, 2)]
    assert eager[0] == eager[1] != eager[2]
    engine = make_engine(tiny_model, compile=True)
    assert generated(engine, PROMPT, 40, sampling, seed=1) == eager[0]


def graphs():
    return counters["stats"]["unique_graphs"]


def test_one_graph_serves_every_prompt_length_and_position(tiny_model):
    engine = make_engine(tiny_model, "int8", compile=True)
    generated(engine, PROMPT[:5], 3)
    assert graphs() == 1
    for length in (1, 2, 5, 17, 21):
        generated(engine, PROMPT[:length], 30)
    assert graphs() == 1
    assert not counters["graph_break"]


def test_target_and_draft_engines_live_side_by_side(tiny_model):
    small = seeded_model(dataclasses.replace(TINY, num_layers=1))
    engines = [make_engine(model, compile=True) for model in (tiny_model, small)]
    answers = [generated(engine, PROMPT, 10) for engine in engines]
    assert answers == [greedy(tiny_model, PROMPT, 10), greedy(small, PROMPT, 10)]
    assert answers == [generated(engine, PROMPT, 10) for engine in engines]


def test_one_engine_compiles_each_kind_of_call_once_and_mixes_none_up(tiny_model):
    compiled, eager = (
        make_engine(tiny_model, "int8", compile=compile) for compile in (True, False)
    )
    kinds = [
        GREEDY,
        Sampling(320, temperature=0.9, top_k=50),
        Sampling(320, temperature=0.9, top_k=7),
        Sampling(100, temperature=0),
    ]
    for sampling in kinds * 2:
        expected = generated(eager, PROMPT, 12, sampling)
        assert generated(compiled, PROMPT, 12, sampling) == expected
    assert graphs() == len(kinds)


def test_a_compiled_step_takes_arguments_of_any_layout(tiny_model):
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    sampling = Sampling(320, temperature=0.9, top_k=50)
    noise = torch.rand(50, 2).mT
    answers = []
    for compile in (True, False):
        caches = make_caches(TINY, ("int8", "int8"), 2, 128)
        engine, got = Engine(tiny_model, caches, compile=compile), []
        engine.prefill(ids[:, :12])
        for i, start_pos in enumerate([torch.tensor([12, 12]), torch.tensor([13]).expand(2)] * 2):
            token = ids[:, 12 + i : 13 + i]
            for x in (token, token.contiguous()):
                got.append(engine.decode(x, start_pos, sampling, noise))
                got.append(engine.decode(x, start_pos.clone(), sampling, noise.double()))
        answers.append(torch.stack(got))
    assert torch.equal(*answers)
    assert graphs() == 1


@pytest.mark.parametrize("compile", [False, True])
def test_a_second_prompt_in_one_process_gives_the_text_of_a_fresh_one(compile, tiny_model):
    used = make_engine(tiny_model, "int8", compile=compile)
    for prompt in (PROMPT, PROMPT[3:7], PROMPT[::-1]):
        fresh = make_engine(tiny_model, "int8", compile=compile)
        assert generated(used, prompt, 20) == generated(fresh, prompt, 20)


def test_a_long_prompt_or_answer_after_a_short_one_is_that_of_a_fresh_process(tiny_model):
    ids = torch.arange(400).mul(7).remainder(300).tolist()
    used = make_engine(tiny_model, "int8", compile=True, cache_len=512)
    for prompt, new_tokens in ((ids[:10], 5), (ids, 5), (ids[:10], 100)):
        fresh = make_engine(tiny_model, "int8", compile=False, cache_len=512)
        assert generated(used, prompt, new_tokens) == generated(fresh, prompt, new_tokens)


@pytest.mark.parametrize("compile", [False, True])
def test_the_layout_of_the_cache_changes_no_id(compile, tiny_model, monkeypatch):
    prompt = PROMPT * 5  # in chunks: 21 * 5 ids, the last chunk behind 100 of them
    answers = []
    for layout in (use_reference, use_tiles):
        layout(monkeypatch)
        engine = make_engine(tiny_model, "int8", compile=compile, chunk=50)
        answers.append(generated(engine, prompt, 150))
    assert engine.caches[0].v_codes.ndim == 5
    assert answers[0] == answers[1]
    assert graphs() == (2 if compile else 0)
    assert not counters["graph_break"]


@pytest.mark.parametrize("cache_len", [128, 256, 1024])
def test_the_allocated_length_changes_no_id(cache_len, tiny_model):
    count = 64 - len(PROMPT) + 1  # the last is never stored
    ids = generated(make_engine(tiny_model, "int8", cache_len=cache_len), PROMPT, count)
    assert ids == generated(make_engine(tiny_model, "int8", cache_len=64), PROMPT, count)


@pytest.mark.parametrize("chunk", [1, 4, 20, 21])
def test_prefill_in_chunks_equals_one_chunk_with_a_full_precision_cache(chunk, tiny_model):
    prompt = torch.tensor([PROMPT])
    expected = make_engine(tiny_model).prefill(prompt)
    logits = make_engine(tiny_model, chunk=chunk).prefill(prompt)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_starting_behind_stored_tokens_equals_one_long_prompt(tiny_model):
    engine = make_engine(tiny_model)
    engine.prefill(torch.tensor([PROMPT[:13]]))
    behind = generated(engine, PROMPT[13:], 20, start=13)
    assert behind == generated(make_engine(tiny_model), PROMPT, 20)
    assert behind == generated(engine, PROMPT[13:], 20, start=13)  # rewinding is the argument


def test_a_batch_gives_each_row_its_own_answer(tiny_model):
    caches = make_caches(TINY, ("int8", "int8"), 2, 128)
    engine = Engine(tiny_model, caches, compile=False)
    rows = [PROMPT[:9], PROMPT[9:18]]
    tokens = torch.cat(list(generate(engine, torch.tensor(rows), 12, GREEDY)), dim=1)
    assert tokens.tolist() == [generated(make_engine(tiny_model, "int8"), r, 12) for r in rows]


def test_tokens_that_do_not_fit_the_cache_are_refused_before_anything_runs(tiny_model):
    engine = make_engine(tiny_model, cache_len=64)
    assert len(generated(engine, PROMPT, 64 - 21 + 1)) == 44  # the last id is never stored
    with pytest.raises(ValueError, match=r"0 \+ 21 \+ 45 tokens > 64"):
        generated(engine, PROMPT, 45)


def test_non_finite_logits_give_minus_one():
    logits = torch.randn(4, 320)
    logits[1, 7], logits[2, 7], logits[3, 7] = torch.nan, torch.inf, -torch.inf
    for sampling in (GREEDY, Sampling(320, temperature=1.0, top_k=20), Sampling(320, top_k=0)):
        noise = sampling.noise(4, torch.Generator().manual_seed(0))
        ids = sample(logits, sampling, noise)[:, 0].tolist()
        assert ids[1:3] == [-1, -1]
        assert min(ids[0], ids[3]) >= 0


def test_a_non_finite_step_stays_visible_to_the_end(tiny_model):
    engine = make_engine(tiny_model)
    tokens = generate(engine, torch.tensor([PROMPT]), 10, GREEDY)
    ids = [int(next(tokens)) for _ in range(3)]
    tiny_model.norm.weight.data.fill_(torch.nan)
    ids += [int(token) for token in tokens]
    assert min(ids[:3]) >= 0
    assert ids[3:] == [-1] * 7


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 5)])
def test_samples_are_distributed_as_the_softmax(temperature, top_k):
    draws, sampling = 20_000, Sampling(12, temperature, top_k)
    logits = 2 * torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    noise = sampling.noise(draws, torch.Generator().manual_seed(1))
    ids = sample(logits.expand(draws, -1), sampling, noise)[:, 0]
    kept = logits[0].topk(top_k or 12).indices
    scores = torch.full((12,), -torch.inf).index_copy(0, kept, logits[0, kept] / temperature)
    expected = draws * scores.softmax(-1)
    counts = torch.bincount(ids, minlength=12)
    assert bool((counts[expected == 0] == 0).all())
    hit = expected > 0
    chi_square = ((counts[hit] - expected[hit]) ** 2 / expected[hit]).sum()
    assert chi_square < 31.3  # 99.9th percentile with 11 degrees of freedom, 5 have less


@pytest.mark.parametrize(("temperature", "top_k"), [(0, 0), (1.0, 0), (1.0, 5)])
def test_padding_of_the_embedding_is_never_chosen(temperature, top_k):
    sampling = Sampling(12, temperature, top_k)
    logits = torch.randn(500, 16)
    logits[:, 12:] += 20
    ids = sample(logits, sampling, sampling.noise(500, torch.Generator().manual_seed(1)))
    assert ids.max() < 12


def test_temperature_zero_is_an_exact_argmax():
    logits = torch.randn(3, 320)
    assert GREEDY.noise(3, torch.Generator()) is None
    assert torch.equal(sample(logits, GREEDY, None), logits.argmax(-1, keepdim=True))


@pytest.mark.cuda
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_cuda_graphs_are_not_skipped_and_change_no_id(kv_format):
    model = seeded_model(dtype=torch.bfloat16)
    eager = generated(make_engine(model, kv_format, device="cuda"), PROMPT, 64)
    engine = make_engine(model, kv_format, compile=True, device="cuda")
    assert generated(engine, PROMPT, 64) == eager
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.cuda
def test_cuda_step_outputs_kept_in_a_list_stay_valid():
    engine = make_engine(seeded_model(dtype=torch.bfloat16), "int8", compile=True, device="cuda")
    prompt = torch.tensor([PROMPT], device="cuda")
    read_at_once = [int(token) for token in generate(engine, prompt, 40, GREEDY)]
    kept = list(generate(engine, prompt, 40, GREEDY))
    assert [int(token) for token in kept] == read_at_once


@pytest.mark.cuda
def test_a_cuda_decode_step_never_waits_for_the_host():
    engine = make_engine(seeded_model(dtype=torch.bfloat16), "int8", compile=True, device="cuda")
    prompt = torch.tensor([PROMPT], device="cuda")
    tokens = generate(engine, prompt, 40, GREEDY)
    for _ in range(5):
        next(tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_each_width_of_noise_has_a_step_of_its_own(tiny_model):
    compiled, eager = (make_engine(tiny_model, compile=compile) for compile in (True, False))
    sampling = Sampling(320, temperature=0.8, top_k=50)
    token, start_pos = torch.tensor([[3]]), torch.tensor([0])
    for width in (50, 9):
        noise = torch.zeros(1, width)
        noise[0, width // 2] = 50  # is chosen whatever the logits
        found = compiled.decode(token, start_pos, sampling, noise)
        assert found.tolist() == eager.decode(token, start_pos, sampling, noise).tolist()
