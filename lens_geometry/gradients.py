"""Edits with their gradients written out: a few passes over memory, where autograd makes dozens.

Each does forward what its plain function does, to the last bit. A gradient of the gradient is left to autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lens_geometry.vectors import coefficient_of, dot, norm, unit


def change_of(u: Tensor, r: Tensor, s_par: float | Tensor, s_perp: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u' - u for a prepared reference, <u, r> / |r|^2, and that |r|^2 (1 for a zero reference)."""
    square = dot(r, r)
    square = square.masked_fill(square == 0, 1.0)
    coefficient = dot(u, r) / square
    if isinstance(s_perp, float) and s_perp == 1.0:  # the common case: one pass over u less
        return ((s_par - 1.0) * coefficient) * r, coefficient, square
    return (s_perp - 1.0) * u + ((s_par - s_perp) * coefficient) * r, coefficient, square


class Change(torch.autograd.Function):
    """`change_of` with its gradients written out: a third of the passes over memory that autograd makes.

        y = (s_perp - 1) u + k a r        a = <u, r> / |r|^2        k = s_par - s_perp        p = <g, r> / |r|^2
        dL/du = (s_perp - 1) g + k p r    dL/dr = k (a g + p u - 2 a p r)
        dL/ds_par = a <g, r>              dL/ds_perp = <g, u> - a <g, r>

    `r` comes twice, as it is and prepared: y is the same for both, and dL/dr that of the prepared one times its scale.
    """

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, wide: Tensor, r: Tensor, scale: Tensor, s_par: float | Tensor, s_perp: float | Tensor
    ) -> Tensor:
        change, coefficient, square = change_of(u, r, s_par, s_perp)
        given = [s if isinstance(s, Tensor) else None for s in (s_par, s_perp)]
        ctx.numbers = [s if isinstance(s, float) else None for s in (s_par, s_perp)]
        ctx.save_for_backward(u, wide, r, scale, coefficient, square, *given)
        return change

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        u, wide, r, scale, coefficient, square, *given = ctx.saved_tensors
        s_par, s_perp = (n if t is None else t for n, t in zip(ctx.numbers, given, strict=True))
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted: by autograd, through all of it
            wanted = wanted_of(ctx, 0, 1, 4, 5)
            inputs = [x for x, wants in zip((u, wide, s_par, s_perp), wanted, strict=True) if wants]
            change = change_of(u, wide * scale, s_par, s_perp)[0]
            found = iter(torch.autograd.grad(change, inputs, g, create_graph=True))
            du, dwide, dpar, dperp = (next(found) if wants else None for wants in wanted)
            return du, dwide, None, None, dpar, dperp
        k, along, du, dwide, dpar, dperp = s_par - s_perp, dot(g, r), None, None, None, None
        p = along / square
        alone = isinstance(s_perp, float) and s_perp == 1.0
        if ctx.needs_input_grad[0]:
            du = (k * p) * r
            du = du if alone else du.add_((s_perp - 1.0) * g)
        if ctx.needs_input_grad[1]:
            a = (k * scale) * coefficient
            dwide = (a * g).addcmul_((k * scale) * p, u).addcmul_(a * p, r, value=-2)
        if ctx.needs_input_grad[4]:
            dpar = (coefficient * along).sum_to_size(s_par.shape)
        if ctx.needs_input_grad[5]:
            dperp = (dot(g, u) - coefficient * along).sum_to_size(s_perp.shape)
        return du, dwide, None, None, dpar, dperp


class Matched(torch.autograd.Function):
    """`matched_of` with its gradients written out, where autograd makes some sixty passes over memory.

        n = c U + s w        U = u/|u|   R = r/|r|   q = u_perp   c = <u, R>/|u|   s = |q|/|u|   e = q/|q|
        m = v - <v, U> U the noise v's part beside u, w = m/|m|, and H = s (g - <g, w> w) / |m|

        dL/dU = c g - <v, U> H - <H, U> v        dL/dc = <g, U>        dL/ds = <g, w>
        dL/du = (dL/dU + dL/dc R + dL/ds e - (<dL/dU, U> + c dL/dc + s dL/ds) U) / |u|
        dL/dr = (dL/dc q - c |u| dL/ds e) / (|u| |r|)

    `r` comes twice, as in `Change`, and so does u. The noise gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, wide: Tensor, r: Tensor, near_one: Tensor, noise: Tensor) -> Tensor:
        direction, *kept = matched_of(u, r, near_one, noise)
        ctx.save_for_backward(u, wide, r, noise, *kept)
        return direction

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        u, wide, r, noise, coefficient, cosine, sine, along, aside = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = ctx.needs_input_grad[:2]
            inputs = [x for x, wants in zip((u, wide), wanted, strict=True) if wants]
            found = iter(torch.autograd.grad(matched_of(u, wide, u, noise)[0], inputs, g, create_graph=True))
            return (*(next(found) if wants else None for wants in wanted), None, None, None)
        size, length = norm(u), norm(wide)
        inverse, inverse_length = (torch.where(x == 0, 0.0, 1.0 / x) for x in (size, length))
        rest = torch.addcmul(u, coefficient, r, value=-1)
        beside = norm(rest)
        for_cosine, for_sine, spoken = dot(g, along), dot(g, aside), dot(noise, along)
        turned = torch.addcmul(g, for_sine, aside, value=-1)
        part = norm(torch.addcmul(noise, spoken, along, value=-1))
        turned.mul_(sine * torch.where(part == 0, 0.0, 1.0 / part))
        back = (cosine * g).addcmul_(spoken, turned, value=-1).addcmul_(dot(turned, along), noise, value=-1)
        radial = dot(back, along) + cosine * for_cosine + sine * for_sine
        along_rest = for_sine * torch.where(beside == 0, 0.0, 1.0 / beside)
        du, dwide = None, None
        if ctx.needs_input_grad[0]:
            back.addcmul_(radial, along, value=-1).addcmul_(for_cosine * inverse_length, wide)
            du = back.addcmul_(along_rest, rest).mul_(inverse).to(u.dtype)
        if ctx.needs_input_grad[1]:
            dwide = ((for_cosine * inverse - cosine * along_rest) * inverse_length) * rest
        return du, dwide, None, None, None


def matched_of(u: Tensor, r: Tensor, near_one: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
    """`matched_direction` of prepared vectors; <u, r> / |r|^2; its cosine and sine, and what they multiply.

    `near_one` is the update again, in the noise's dtype and of a length near 1.
    """
    reference_norm, size = norm(r), norm(u)
    coefficient = coefficient_of(u, r, reference_norm)
    parallel, perpendicular = coefficient.abs() * reference_norm, norm(torch.addcmul(u, coefficient, r, value=-1))
    along, aside = unit(near_one), noise
    for _ in range(2):  # the second time takes away what rounding left of the first
        aside = unit(aside - dot(aside, along) * along)
    size = size.masked_fill(size == 0, 1.0)
    cosine, sine = parallel.copysign(coefficient) / size, perpendicular / size
    return cosine * along + sine * aside, coefficient, cosine, sine, along, aside


class WithoutDiagonal(torch.autograd.Function):
    """`without_diagonal` with its gradients written out: maps are large, and most of its cost is their memory.

    With y = x / R for the rest of a row, R its sum: dL/dx = (g - <g, y>) / R, and 0 on the diagonal.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, chosen: Tensor | None, renormalise: bool, keep_first: bool) -> Tensor:
        rows, taken, divisor = without_diagonal(whole, chosen, renormalise, keep_first)
        ctx.save_for_backward(whole, chosen, rows, taken, divisor)
        ctx.how = renormalise, keep_first
        return rows

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        whole, chosen, rows, taken, divisor = ctx.saved_tensors
        if torch.is_grad_enabled():
            again = without_diagonal(whole, chosen, *ctx.how)[0]
            return *torch.autograd.grad(again, whole, g, create_graph=True), None, None, None
        own = _diagonal(g)
        if divisor is None:
            back = g.clone()
        else:
            back = g * rows
            inner = back.sum(-1, keepdim=True).masked_fill(~taken, 0.0)
            back = torch.sub(g, inner, out=back).div_(divisor)
        _diagonal(back).copy_(own.masked_fill(taken.squeeze(-1), 0.0))
        return back, None, None, None


def without_diagonal(
    whole: Tensor, chosen: Tensor | None, renormalise: bool, keep_first: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention maps [..., query, key] without their diagonal, in the chosen rows; which rows, and their divisor.

    With `keep_first` rows that have nothing else are left as they are.
    """
    rows = whole.clone()
    own = _diagonal(whole)
    _diagonal(rows).zero_()
    rest = rows.sum(-1, keepdim=True)
    taken = torch.ones_like(rest, dtype=torch.bool) if chosen is None else chosen
    taken = taken & (rest != 0) if keep_first else taken
    divisor = None
    if renormalise:
        divisor = torch.where(taken & (rest != 0), rest, 1.0)
        rows = rows / divisor if torch.is_grad_enabled() else rows.div_(divisor)
    _diagonal(rows).copy_(own.masked_fill(taken.squeeze(-1), 0.0))
    return rows, taken, divisor


def _diagonal(maps: Tensor) -> Tensor:
    """Each query's weight on its own token; with a KV cache the queries are the last keys."""
    return maps.diagonal(maps.shape[-1] - maps.shape[-2], -2, -1)


def wanted_of(ctx: Any, *places: int) -> tuple[bool, ...]:
    """Which of some inputs need a gradient."""
    return tuple(ctx.needs_input_grad[place] for place in places)
