"""Steps that sample, for the device sampler and for the numpy sampler that defines it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sampling_cases import CONTEXT, EOS, assert_agree, random_logits, random_masks, random_requests
from weft.backends.grammar import NO_MASKS, Masks
from weft.backends.step_arrays import Rows
from weft.plan import IterationPlan, RowStart
from weft.request import RequestId, SamplingParams
from weft.sampling import reference as twin
from weft.sampling.reference import Sampled

if TYPE_CHECKING:
    from weft.backends.cuda.sampler import DeviceSampler
    from weft.ops.triton.device import Device

assert_same = partial(assert_agree, relative=1e-6, absolute=2e-6)


class Step:
    """Entries that sample in one step, each with its own row and history."""

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
            RowStart(row, RequestId(str(row)), history, prompt_length, params, seed, (0,))
            for row, history, prompt_length, params, seed in zip(*columns, strict=True)
        )
        self.positions = [len(history) for history in self.histories]

    def only(self, entry: int) -> Step:
        one = slice(entry, entry + 1)
        return Step(self.params[one], self.histories[one], self.prompt_lengths[one], self.seeds[one])

    def expected(self, logits: np.ndarray, masks: Masks = NO_MASKS) -> Sampled:
        """The result of the numpy sampler."""
        count = len(self.params)
        plan = IterationPlan(
            step=0,
            num_decodes=count,
            request_ids=tuple(RequestId(str(row)) for row in self.rows),
            rows=tuple(self.rows),
            starts=tuple(position - 1 for position in self.positions),
            counts=(1,) * count,
            samples=(True,) * count,
            row_starts=self.starts,
        )
        rows = Rows(max(self.rows) + 1, CONTEXT, 16)
        rows.update(plan)
        with np.errstate(all="ignore"):
            return twin.sample(logits, rows.prepare(plan).entries, rows, EOS, masks)


class OnDevice:
    """A device sampler with its token rows."""

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
        """The result in the form of the numpy sampler. `padding`: number of padded entries after those of the step."""
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
            "the sampler must not change the logits"
        )
        pending = self.sampler.collect(step.rows, path)
        self.device.synchronize()
        errors = dict(masks.errors)
        codes = self.sampler.errors[:count].tolist()
        for entry, code in enumerate(codes):
            if code:
                failure = self.sampler.failure(code)
                errors[entry] = failure if failure == twin.NOT_A_NUMBER else errors.get(entry, failure)
        tokens = self.sampler.tokens[:count].cpu().numpy().astype(np.int64)
        written = [
            self.row_tokens[row, place].item() for row, place in zip(step.rows, step.positions, strict=True)
        ]
        assert written == tokens.tolist(), "the next step reads the tokens from the rows"
        return Sampled(tokens, None if pending is None else pending.read(errors), errors)


def rounded_to_bfloat16(logits: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(logits).to(torch.bfloat16).to(torch.float32).numpy()


def random_step(random: np.random.Generator, count: int, vocabulary: int) -> tuple[Step, np.ndarray, Masks]:
    requests = random_requests(random, count, vocabulary)
    rows = random.permutation(32)[:count].tolist()
    step = Step(requests.params, requests.histories, requests.prompt_lengths, requests.seeds, rows)
    return step, random_logits(random, count, vocabulary), random_masks(random, step.params, vocabulary)
