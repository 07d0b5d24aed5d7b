"""Draws and scores tokens of which each rank has the logits of some: what ranks exchange does not grow with them.

A row is drawn as one process draws it: the highest logit of all ranks, the weight of each rank's tokens, and one
uniform number say which rank has the token, and how far into its own. Every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.ranks.rank import Ranks, is_last
from gpu_worker.layers.vocabulary import Vocabulary
from kernels import sampling

_MAX_LISTED = 512
"""Logits of a row that a rank tells where `top_k` or `top_p` cut it off; if these are too few, the row is gathered."""


def vocabulary_of(ranks: Ranks, vocab_size: int) -> Vocabulary:
    """Return what draws and scores tokens at a rank."""
    if ranks.size > 1:
        return DividedVocabulary(ranks, vocab_size)
    return Vocabulary() if ranks.num_stages == 1 else StageVocabulary(ranks)


class StageVocabulary(Vocabulary):
    """All tokens, whose grammars rank 0 of the first stage knows."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.is_first = ranks.rank == 0 and ranks.stage == 0

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the rank that `is_first` at the last stage; at others, let them come there."""
        if is_last(self._ranks):
            return self._ranks.share(numbers)
        if self.is_first:
            self._ranks.tell_last(numbers)
        return numbers


class DividedVocabulary(StageVocabulary):
    """Those of a rank, whose logits are `[num_rows, ceil(vocab_size / num_ranks)]`."""

    def __init__(self, ranks: Ranks, vocab_size: int) -> None:
        super().__init__(ranks)
        self._size = vocab_size
        self._count = -(-vocab_size // ranks.size)
        self._first = ranks.rank * self._count

    def widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, vocab_size]`: minus infinity for the tokens of others."""
        wide = logits.new_full((len(logits), self._size), -torch.inf)
        own = max(0, min(self._count, self._size - self._first))
        wide[:, self._first : self._first + own] = logits[:, :own]
        return wide

    def _own(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[1] == self._count:
            return logits
        own = logits[:, self._first : self._first + self._count]
        return own if own.shape[1] else logits.new_full((len(logits), 1), -torch.inf)

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the highest logit of each row, `[num_rows]`, of all ranks."""
        return self._told(logits.amax(1)).amax(0)

    def draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        parameters: sampling.SamplingParameters,
        *,
        may_truncate: bool = True,
        marks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do what `sample_tokens` does, with a rank's logits, widened or not."""
        own = self._own(logits)
        highest, columns = sampling.part_highest(own)
        told = self._told(torch.stack((highest.double(), (columns + self._first).double()), 1))
        highests = told[..., 0]
        highest = highests.amax(0)
        # The first rank that has it has the first token.
        likeliest = told[..., 1].gather(0, (highests == highest).int().argmax(0, keepdim=True))[0].long()
        scales = parameters.inverse_temperature[slots]
        is_valid = highest.isfinite() & scales.isfinite()
        is_greedy = scales == 0
        if own.is_cpu and bool(is_greedy.all()):
            return likeliest.masked_fill_(~is_valid, sampling.INVALID_TOKEN)
        scales = scales.masked_fill(is_greedy, 1.0)
        highest = highest.float()
        least = torch.full_like(highest, -torch.inf)
        is_cut_off: torch.Tensor | None = None
        if may_truncate:
            least, is_cut_off = self._least(own, scales, highest, slots, parameters)
        masses = self._told(sampling.part_masses(own, scales, highest, least))
        behind = masses.cumsum(0)
        target = sampling.uniforms(parameters.seed[slots], positions) * behind[-1]
        # Where sums were rounded otherwise, the last token with any weight is meant.
        has_any = (masses > 0).int()
        last = self._ranks.size - 1 - has_any.flip(0).argmax(0)
        owner = (behind <= target).sum(0).minimum(last)
        before = (behind - masses)[self._ranks.rank]
        drawn = sampling.part_draw(own, scales, highest, least, (target - before).contiguous()) + self._first
        drawn = self._told(drawn).gather(0, owner[None])[0].clamp_(max=self._size - 1)
        if marks is not None:
            drawn = self._marked(drawn, (own - highest[:, None]) * scales[:, None], least, marks)
        is_valid = is_valid & (behind[-1].isfinite() | is_greedy)
        token_ids = torch.where(is_greedy, likeliest, drawn).masked_fill_(~is_valid, sampling.INVALID_TOKEN)
        if is_cut_off is not None and bool((is_cut_off & ~is_greedy).any()):
            rows = (is_cut_off & ~is_greedy).nonzero()[:, 0]
            whole = self._ranks.gather(self._padded(own).index_select(0, rows))[:, : self._size].contiguous()
            marks = None if marks is None else marks[rows]
            token_ids[rows] = sampling.sample_tokens(whole, slots[rows], positions[rows], parameters, marks=marks)
        return token_ids

    def _marked(
        self, drawn: torch.Tensor, scaled: torch.Tensor, least: torch.Tensor, marks: torch.Tensor
    ) -> torch.Tensor:
        """Return what each row draws under its mark, and `drawn` where it has none, `[num_rows]` int64."""
        scores = sampling.marked_scores(scaled, least, marks, self._first)
        best, columns = scores.max(dim=1)
        told = self._told(torch.stack((best, (columns + self._first).double()), 1))
        # The first rank that has it has the first token.
        marked = told[..., 1].gather(0, told[..., 0].argmax(0, keepdim=True))[0].long()
        return torch.where(marks != 0, marked, drawn)

    def _least(
        self,
        own: torch.Tensor,
        scales: torch.Tensor,
        highest: torch.Tensor,
        slots: torch.Tensor,
        parameters: sampling.SamplingParameters,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smallest scaled logit that each row keeps, and which rows hide it below what ranks list."""
        log_min_p = parameters.log_min_p[slots].nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
        top_k, top_p = parameters.top_k[slots].long(), parameters.top_p[slots].double()
        scaled = (self._padded(own) - highest[:, None]) * scales[:, None]
        listed = scaled.topk(min(_MAX_LISTED, self._count)).values
        every = self._told(listed)
        lowest = every[..., -1].amax(0) if self._count > _MAX_LISTED else torch.full_like(highest, -torch.inf)
        merged = every.transpose(0, 1).flatten(1).sort(dim=1, descending=True).values
        has_top_k = (top_k > 0) & (top_k < self._size)
        kth = merged.gather(1, top_k.clamp(1, merged.shape[1])[:, None] - 1)[:, 0]
        is_all_listed = self._count <= _MAX_LISTED
        is_hidden = has_top_k & ((kth <= lowest) & (not is_all_listed) | (top_k > merged.shape[1]))
        least = log_min_p.maximum(torch.where(has_top_k, kth, -torch.inf))
        weights = merged.double().exp().masked_fill_(merged < least[:, None], 0.0)
        cumulative = weights.cumsum(1)
        total = torch.where(
            has_top_k, cumulative[:, -1], self._told(sampling.part_masses(own, scales, highest, log_min_p)).sum(0)
        )
        is_enough = cumulative >= (top_p * total)[:, None]
        nucleus = merged.gather(1, is_enough.int().argmax(1, keepdim=True))[:, 0]
        has_top_p = top_p < 1
        is_hidden |= has_top_p & (~is_enough.any(1) | (nucleus < lowest))
        return least.maximum(torch.where(has_top_p, nucleus, -torch.inf)), is_hidden

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> sampling.TokenScores:
        """Do what `score_tokens` does, with a rank's logits as the model computed them."""
        highest = self.highest(logits)
        ones = torch.ones_like(highest)
        totals = self._told(sampling.part_masses(logits, ones, highest, -torch.inf * ones)).sum(0)
        log_total = totals.float().log()
        chosen = self.values(logits, token_ids[:, None])[:, 0] - highest - log_total
        num_listed, num_top = min(num_top, self._count), min(num_top, self._size)
        # In the order of ids among equals, as in that of ranks.
        ids = sampling.score_tokens(logits, torch.zeros_like(token_ids), num_listed).top_ids
        values = self._told(logits.gather(1, ids)).transpose(0, 1).flatten(1)
        every = self._told(ids + self._first).transpose(0, 1).flatten(1)
        order = values.argsort(dim=1, descending=True, stable=True)[:, :num_top]
        top_values = values.gather(1, order) - highest[:, None] - log_total[:, None]
        return sampling.TokenScores(chosen, every.gather(1, order).clamp_(max=self._size - 1), top_values)

    def values(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Do what `Vocabulary` promises."""
        columns = token_ids - self._first
        is_own = (columns >= 0) & (columns < self._count)
        own = logits.gather(1, columns.clamp(0, self._count - 1)).masked_fill_(~is_own, -torch.inf)
        return self._told(own).amax(0)

    def columns(self, logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Do what `Vocabulary` promises."""
        other, places = logits.new_full((len(logits),), -torch.inf), [each - self._first for each in token_ids]
        own = [logits[:, place] if 0 <= place < self._count else other for place in places]
        return self._told(torch.stack(own, dim=1)).amax(0)

    def _padded(self, own: torch.Tensor) -> torch.Tensor:
        missing = self._count - own.shape[1]
        return torch.nn.functional.pad(own, (0, missing), value=-torch.inf) if missing else own

    def _told(self, own: torch.Tensor) -> torch.Tensor:
        gathered = self._ranks.gather(own.reshape(1, -1))
        return gathered.view(self._ranks.size, *own.shape)
