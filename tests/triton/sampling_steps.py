"""Steps that sample, for the device's sampler and for the numpy sampler that defines it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from weft.backends.batch import Rows
from weft.backends.cpu import sampler as twin
from weft.backends.cpu.sampler import Sampled
from weft.backends.grammar import NO_MASKS, Masks
from weft.plan import IterationPlan, RowStart
from weft.request import Grammar, RequestId, SamplingParams

if TYPE_CHECKING:
    from weft.backends.cuda.sampler import DeviceSampler
    from weft.ops.triton.device import Device

CONTEXT = 64
EOS = frozenset({0, 3})
ANY_JSON = Grammar("json_schema", "{}")


class Step:
    """Entries that sample in one step, each in a row of its own with a history of its own."""

    def __init__(
        self,
        params: list[SamplingParams],
        histories: list[tuple[int, ...]] | None = None,
        prompt_lengths: list[int] | None = None,
        seeds: list[int] | None = None,
        rows: list[int] | None = None,
    ) -> None:
        self.params = params
        self.histories = histories or [(1, 2, 3)] * len(params)
        self.prompt_lengths = prompt_lengths or [len(history) for history in self.histories]
        self.seeds = seeds or list(range(len(params)))
        self.rows = rows or list(range(len(params)))
        columns = (self.rows, self.histories, self.prompt_lengths, self.params, self.seeds)
        self.starts = tuple(
            RowStart(row, RequestId(row), history, prompt_length, params, seed, (0,))
            for row, history, prompt_length, params, seed in zip(*columns, strict=True)
        )
        self.positions = [len(history) for history in self.histories]

    def only(self, entry: int) -> Step:
        one = slice(entry, entry + 1)
        return Step(self.params[one], self.histories[one], self.prompt_lengths[one], self.seeds[one])

    def expected(self, logits: np.ndarray, masks: Masks = NO_MASKS) -> Sampled:
        """By the numpy sampler."""
        count = len(self.params)
        plan = IterationPlan(
            step=0,
            num_decodes=count,
            request_ids=tuple(RequestId(row) for row in self.rows),
            rows=tuple(self.rows),
            starts=tuple(position - 1 for position in self.positions),
            counts=(1,) * count,
            samples=(True,) * count,
            row_starts=self.starts,
        )
        rows = Rows(max(self.rows) + 1, CONTEXT, 16)
        rows.update(plan)
        with np.errstate(all="ignore"):
            return twin.sample(logits, rows.sampled_entries(plan), rows, EOS, masks)


class OnDevice:
    """A sampler of the device with its rows of tokens."""

    def __init__(self, device: Device, vocabulary: int, num_rows: int = 32, max_sampled: int = 32) -> None:
        import torch

        from weft.backends.cuda.sampler import DeviceSampler

        self.device = device
        self.row_tokens = device.zeros(num_rows, CONTEXT + 1, dtype=torch.int32)
        self.sampler: DeviceSampler = DeviceSampler(
            num_rows, vocabulary, EOS, self.row_tokens, device, max_sampled
        )

    def sample(
        self, step: Step, logits: np.ndarray, masks: Masks = NO_MASKS, *, dtype: Any = None, padding: int = 0
    ) -> Sampled:
        """As the numpy sampler's answer. `padding`: so many entries of no row behind the step's."""
        import torch

        place = self.device.torch_device
        self.sampler.start(step.starts)
        for row, history in zip(step.rows, step.histories, strict=True):
            self.row_tokens[row, : len(history)] = torch.tensor(history, dtype=torch.int32)
        count = len(step.rows)
        padded = np.concatenate([logits, np.full((padding, logits.shape[1]), np.nan, np.float32)])
        on_device = torch.from_numpy(padded).to(place)
        if dtype is not None:
            on_device = on_device.to(dtype)
        rows = torch.tensor(step.rows + [-1] * padding, dtype=torch.int32, device=place)
        positions = torch.tensor(step.positions + [0] * padding, dtype=torch.int32, device=place)
        lines = np.full(count + padding, -1, np.int32)
        lines[masks.entries] = np.arange(len(masks.entries))
        has_masks = len(masks.entries) > 0
        path = self.sampler.path(step.rows, masked=has_masks)
        bits = None
        if has_masks:
            bits = (
                torch.from_numpy(masks.bits.view(np.int32).copy()).to(place),
                torch.from_numpy(lines).to(place),
            )
        before = on_device.clone()
        self.sampler.sample(on_device, rows, positions, path, bits)
        assert torch.equal(on_device.view(torch.int8), before.view(torch.int8)), (
            "the logits are left as they are"
        )
        pending = self.sampler.collect(step.rows, path)
        self.device.synchronize()
        errors = dict(masks.errors)
        codes = self.sampler.errors[:count].tolist()
        for entry, code in enumerate(codes):
            if code:
                text = self.sampler.error_text(code)
                errors[entry] = text if text == twin.NOT_A_NUMBER else errors.get(entry, text)
        tokens = self.sampler.tokens[:count].cpu().numpy().astype(np.int64)
        written = [
            self.row_tokens[row, place].item() for row, place in zip(step.rows, step.positions, strict=True)
        ]
        assert written == tokens.tolist(), "the next step reads the tokens in the rows"
        return Sampled(tokens, None if pending is None else pending.read(errors), errors)


def assert_same(found: Sampled, expected: Sampled) -> None:
    assert found.errors == expected.errors
    good = [entry for entry in range(len(expected.tokens)) if entry not in expected.errors]
    assert found.tokens[good].tolist() == expected.tokens[good].tolist()
    assert (found.logprobs is None) == (expected.logprobs is None)
    for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            np.testing.assert_allclose(one.logprob, other.logprob, rtol=1e-6, atol=2e-6)
            values = [[value for _, value in told.top] for told in (one, other)]
            np.testing.assert_allclose(values[0], values[1], rtol=1e-6, atol=2e-6)


def rounded_to_bfloat16(logits: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(logits).to(torch.bfloat16).to(torch.float32).numpy()


def random_logits(random: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    kind = random.integers(7)
    logits = random.normal(size=(count, vocabulary)) * random.choice([0.01, 1.0, 3.0, 10.0])
    if kind == 0:
        logits = np.round(logits)  # many ties
    elif kind == 1:
        logits[random.random(logits.shape) < 0.7] = -np.inf
    elif kind == 2:
        logits = logits * 1e30
    elif kind == 3:
        logits[:] = 0.0
    elif kind == 4:
        logits += 1e4  # few bits are left for the differences
    return logits.astype(np.float32)


def random_params(random: np.random.Generator, vocabulary: int) -> SamplingParams:
    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if random.random() < chance else otherwise

    def pick(*values: Any) -> Any:
        return values[random.integers(len(values))]

    biased = random.integers(vocabulary, size=random.integers(1, 4)).tolist()
    return SamplingParams(
        temperature=pick(0.0, 1.0, 1.0, 0.7, 2.5, 100.0, 0.01, 1e-30, 1e-300, 5e-324),
        top_k=sometimes(0.3, int(random.integers(-1, 60)), 0),
        top_p=sometimes(0.3, pick(0.95, 0.5, 0.1, 1e-9, 0.999999), 1.0),
        min_p=sometimes(0.2, pick(0.05, 0.5, 1e-6, 1.0), 0.0),
        typical_p=sometimes(0.2, pick(0.9, 0.2, 0.99), 1.0),
        repetition_penalty=sometimes(0.2, pick(1.3, 0.5, 100.0), 1.0),
        frequency_penalty=sometimes(0.2, float(random.uniform(-2, 2)), 0.0),
        presence_penalty=sometimes(0.2, float(random.uniform(-2, 2)), 0.0),
        logit_bias=sometimes(0.2, {token: float(random.uniform(-100, 100)) for token in biased}, {}),
        min_tokens=sometimes(0.2, int(random.integers(9)), 0),
        stop_token_ids=sometimes(0.3, (int(random.integers(2 * vocabulary)),), ()),
        grammar=sometimes(0.2, ANY_JSON, None),
        logprobs=sometimes(0.2, int(random.integers(21)), None),
    )


def random_masks(random: np.random.Generator, step: Step, vocabulary: int) -> Masks:
    masked = [entry for entry, params in enumerate(step.params) if params.grammar is not None]
    allowed = random.random((len(masked), -(-vocabulary // 32) * 32)) < random.choice([0.01, 0.5])
    bits = np.packbits(allowed, axis=1, bitorder="little")
    return Masks(np.array(masked, np.int64), bits)


def random_step(random: np.random.Generator, count: int, vocabulary: int) -> tuple[Step, np.ndarray, Masks]:
    lengths = random.integers(1, CONTEXT, size=count).tolist()
    # Half of each history from few tokens, so that some come more than once.
    histories = [
        tuple(random.integers(min(vocabulary, 5) if length % 2 else vocabulary, size=length).tolist())
        for length in lengths
    ]
    prompt_lengths = [int(random.integers(1, length + 1)) for length in lengths]
    params = [random_params(random, vocabulary) for _ in range(count)]
    seeds = random.integers(-(2**63), 2**63 - 1, size=count).tolist()
    rows = random.permutation(32)[:count].tolist()
    step = Step(params, histories, prompt_lengths, seeds, rows)
    return step, random_logits(random, count, vocabulary), random_masks(random, step, vocabulary)
