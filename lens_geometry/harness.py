"""The model class that lm-evaluation-harness runs: any TransformerLens model, under a list of edits.

The only module that imports lm_eval at its top; `evals.py` imports it when it is asked for.

Nothing is ever padded: a batch holds sequences of one length. So every edit means for a sequence what it means
for that sequence alone (position -1 is its last token, and no head sees a pad), and the batch size changes
speed alone. Generation is greedy and without a KV cache: each step runs the whole sequence, under the edits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from lens_geometry import models
from lens_geometry.anatomy import at_rest, attached
from lens_geometry.edits import Batch, Hooks, applied
from lens_geometry.errors import DataError, ModelError
from lens_geometry.runner import bar
from lens_geometry.text_requests import Generation, equal_lengths, generation_options


class Answer(NamedTuple):
    """What the model said to one request.

    `said` is the generated text, whether greedy decoding gives the continuation, or "" for a rolling
    log-likelihood. `log_likelihood` is in nats, of the continuation or of the tokens that were generated.
    """

    task: str | None
    document: int
    said: str | bool
    log_likelihood: float
    truncated: bool


class Scored(NamedTuple):
    """Token ids whose continuation is to be scored, and the document that they are from."""

    document: int
    context: list[int]
    continuation: list[int]


class EditedLM(TemplateLM):
    """A TransformerLens model under edits, as lm_eval sees it. Made by `evals.edited_lm`.

    Every request type that lm_eval sends is answered inside one `applied(model, hooks)`, which raises HookError at its
    end when a hook never fired or nothing was changed. `answers` lists what was said, in lm_eval's order.
    """

    def __init__(
        self,
        model: Any,
        hooks: Hooks | Callable[[Batch], Hooks] = (),  # type: ignore[assignment]
        *,
        batch_size: int = 1,
        max_length: int | None = None,
        prepend_bos: bool = False,
        progress: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer = model, model.tokenizer
        self.batch_size, self.prepend_bos, self.progress = batch_size, prepend_bos, progress
        self.max_length = int(model.cfg.n_ctx if max_length is None else max_length)
        self._device = next(model.parameters()).device
        self.batch = Batch()
        self.hooks: Hooks = list(hooks(self.batch) if callable(hooks) else hooks)
        with attached(model, [(name, fn) for name, fn in self.hooks if isinstance(name, str)]):
            pass  # a name that the model does not have is an error now, not after the first task
        self.answers: list[Answer] = []

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's EOS, which ends a generated text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context, as in lm_eval's own classes: BOS, or else EOS."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ModelError(
            "the tokenizer has neither BOS nor EOS, and a text without a context needs one before it",
            cure="set model.tokenizer.bos_token, or choose a task whose requests have a context",
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids without special tokens; after a BOS with `prepend_bos`, unless it is there or was declined."""
        ids = list(self.tokenizer.encode(string, add_special_tokens=False))
        if self.prepend_bos and add_special_tokens is not False and ids[:1] != [self.tokenizer.bos_token_id]:
            return [self.tokenizer.bos_token_id, *ids]
        return ids

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """`(log-likelihood in nats, is it what greedy decoding gives)` of each continuation in its context."""
        wanted = [Scored(_document(i, request), *self._pair(*request.args)) for i, request in enumerate(requests)]
        found = self._score(wanted)
        for request, scored, (value, greedy) in zip(requests, wanted, found, strict=True):
            self._record(request, scored.document, greedy, value, self._overflows(scored))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood in nats of each whole text, in windows of the context, after BOS (or EOS)."""
        wanted: list[Scored] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                wanted.append(Scored(_document(index, request), *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (value, _) in zip(owners, self._score(wanted), strict=True):
            totals[index] += value
        for index, request in enumerate(requests):
            self._record(request, _document(index, request), "", totals[index], truncated=False)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each context, up to its first stop sequence, EOS or the most tokens."""
        texts = [self._generation(_document(i, request), request) for i, request in enumerate(requests)]
        lengths = [len(text.prompt) for text in texts]
        with self._edited(), bar(len(texts), "generations", self.progress) as progress:
            for rows in equal_lengths(lengths, self.batch_size):
                self._generate([texts[row] for row in rows])
                progress.update(len(rows))
        answers = [text.said(self.tokenizer) for text in texts]
        for request, text, answer in zip(requests, texts, answers, strict=True):
            self._record(request, text.document, answer, text.log_likelihood, text.truncated)
        return answers

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refused: lm_eval's cache of answers knows the question and not the edit."""
        raise DataError(
            "lm_eval's cache would give the answers of one edit to another",
            where="use_cache",
            cure="leave use_cache out",
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes beside its scores."""
        return {
            "model_description": models.describe(self.model),
            "edited_hooks": sorted({str(name) for name, _ in self.hooks}),
            "prepend_bos": self.prepend_bos,
            "max_length": self.max_length,
        }

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return self._score([Scored(row, before, after) for row, (_, before, after) in enumerate(requests)])

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Context and continuation as lm_eval splits them; never without a token to condition on."""
        before: list[int] = []
        after = self.tok_encode(continuation, add_special_tokens=False)
        if context:
            before, after = self._encode_pair(context, continuation)
        if not before:
            first = self.prefix_token_id
            before, after = (after[:1], after[1:]) if after[:1] == [first] else ([first], after)
        if not after:
            raise DataError(f"the continuation {continuation!r} has no token of its own", cure="correct the task")
        return before, after

    def _overflows(self, scored: Scored) -> bool:
        return len(scored.context) + len(scored.continuation) > self.max_length + 1

    def _score(self, wanted: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Each distinct input of a document is run once, whichever continuations are read off it."""
        askers: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for index, scored in enumerate(wanted):
            if len(scored.continuation) > self.max_length:
                raise DataError(
                    f"a continuation has {len(scored.continuation)} tokens, more than the context of {self.max_length}",
                    cure="choose a task with shorter answers, or a model with a longer context",
                )
            whole = [*scored.context, *scored.continuation][-(self.max_length + 1) :]
            askers[scored.document, tuple(whole[:-1])].append(index)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(wanted)
        inputs = list(askers)
        with self._edited(bool(inputs)), bar(len(inputs), "log-likelihoods", self.progress) as progress:
            for rows in equal_lengths([len(ids) for _, ids in inputs], self.batch_size):
                logits = self._logits([inputs[row][1] for row in rows], [inputs[row][0] for row in rows])
                for row, of_row in zip(rows, logits, strict=True):
                    for index in askers[inputs[row]]:
                        found[index] = _judged(of_row, wanted[index].continuation)
                progress.update(len(rows))
        return found

    def _generation(self, document: int, request: Any) -> Generation:
        (context, options), task = request.args, request.task_name
        until, most = generation_options(options, task)
        room = self.max_length - most
        if room < 1:
            raise DataError(
                f"generating {most} tokens leaves no room for a prompt in a context of {self.max_length}",
                where=f"task {task}",
                cure="pass max_new_tokens (to lm_eval itself: gen_kwargs={'max_gen_toks': ...})",
            )
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        return Generation(document, prompt[-room:], until, most, truncated=len(prompt) > room)

    def _generate(self, texts: Sequence[Generation]) -> None:
        """Greedy decoding of texts of equal length; each leaves the batch when it is done."""
        running = list(texts)
        while running:
            ids = [(*text.prompt, *text.made) for text in running]
            logits = self._logits(ids, [text.document for text in running])[:, -1]
            logs = _working(logits).log_softmax(-1)
            best = logs.argmax(-1)
            values = logs.gather(-1, best[:, None]).squeeze(-1)
            for text, token, value in zip(running, best.tolist(), values.tolist(), strict=True):
                text.extend(token, value, self.tokenizer)
            running = [text for text in running if not text.done]

    def _logits(self, ids: Sequence[Sequence[int]], documents: Sequence[int]) -> Float[Tensor, "batch pos vocab"]:
        """One forward pass. A document is the sequence that noise belongs to: all its choices meet the same."""
        tokens = torch.tensor(ids)
        if int(tokens.max()) >= self.model.cfg.d_vocab:
            raise ModelError(
                f"token {int(tokens.max())} is outside the model's vocabulary of {self.model.cfg.d_vocab}",
                cure="use the tokenizer that belongs to this model",
            )
        self.batch.ids = list(documents)
        # the side matters to TransformerLens though nothing is padded: on the left it takes a first BOS for padding
        logits: Tensor = self.model(tokens.to(self._device), return_type="logits", padding_side="right")
        return logits

    @contextmanager
    def _edited(self, anything: bool = True) -> Iterator[None]:
        """Every pass of one request type; without any, there is nothing that hooks could fire in."""
        with at_rest(self.model), applied(self.model, self.hooks if anything else []):
            yield

    def _record(self, request: Any, document: int, said: str | bool, value: float, truncated: bool) -> None:
        self.answers.append(Answer(request.task_name, document, said, value, truncated))


def _document(index: int, request: Any) -> int:
    return index if request.doc_id is None else int(request.doc_id)


def _working(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _judged(logits: Float[Tensor, "pos vocab"], continuation: Sequence[int]) -> tuple[float, bool]:
    """Log-likelihood of the continuation whose last token the last position predicts; and whether it is greedy."""
    targets = torch.tensor(continuation, device=logits.device)
    logs = _working(logits[-len(targets) :]).log_softmax(-1)
    values = logs.gather(-1, targets[:, None]).cpu().double()
    return float(values.sum()), bool((logs.argmax(-1) == targets).all())
