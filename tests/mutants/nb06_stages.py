"""Stages of a pipeline with one mistake each, for exercise 06.1."""

from __future__ import annotations

import torch


def share_of_rows(x, micro_batches):
    return len(x) / sum(len(x) for x, _ in micro_batches)


def step(*, weight=share_of_rows, receive=lambda x: x.requires_grad_(), keep=lambda y: y, take=0, before=None,
          order="gpipe", scale=lambda g, micro_batches: g, back=lambda x, y: x.grad, retain=False, count=lambda m: m,
          answer=lambda losses, x: sum(losses), middle=True, own_x=False, grad=True):  # fmt: skip
    """The right step, except for what a keyword says."""

    def pipeline_step(stage, micro_batches, loss_fn, link):
        kept, losses = [], []

        def forward(x, y):
            if not (link.first or own_x):
                x = receive(link.receive_previous())
            elif own_x and not link.first:
                link.receive_previous()
            with torch.set_grad_enabled(grad):
                output = stage(x)
                if link.last or (not middle and not link.first):
                    output = loss_fn(output, y)
                    losses.append(output.item() * share_of_rows(x, micro_batches))
                    output = output * weight(x, micro_batches)
                else:
                    link.send_next(output.detach())
            kept.append((x, keep(output)))

        def backward(at):
            x, output = kept.pop(at)
            if before:
                before(stage)
            gradient = None if link.last or (not middle and not link.first) else link.receive_next()
            output.backward(None if gradient is None else scale(gradient, micro_batches), retain_graph=retain)
            if not link.first:
                link.send_previous(back(x, output))

        batches = micro_batches[: count(len(micro_batches))]
        for x, y in batches:
            forward(x, y)
            if order == "one at a time" or (order == "last at once" and link.last):
                backward(take)
        while kept:
            backward(take if not link.last else 0)
        return answer(losses, x) if link.last else None

    return pipeline_step


def nothing_sent_back(stage, micro_batches, loss_fn, link):
    """As in the article: the second half trains on what arrives, and the first half never hears of it."""
    for x, y in micro_batches:
        x = x if link.first else link.receive_previous()
        output = stage(x)
        if link.last:
            (loss_fn(output, y) * share_of_rows(x, micro_batches)).backward()
        else:
            link.send_next(output.detach())


def never_backward(stage, micro_batches, loss_fn, link):
    for x, y in micro_batches:
        output = stage(x if link.first else link.receive_previous())
        if link.last:
            loss_fn(output, y)
        else:
            link.send_next(output)


def gradient_first(stage, micro_batches, loss_fn, link):
    for x, y in micro_batches:
        x = x if link.first else link.receive_previous().requires_grad_()
        output = stage(x)
        if link.last:
            output = loss_fn(output, y) * share_of_rows(x, micro_batches)
        gradient = None if link.last else link.receive_next()
        if not link.last:
            link.send_next(output.detach())
        output.backward(gradient)
        if not link.first:
            link.send_previous(x.grad)


def receives_everywhere(stage, micro_batches, loss_fn, link):
    link.receive_previous()


def sends_everywhere(stage, micro_batches, loss_fn, link):
    for x, _ in micro_batches:
        link.send_next(stage(x if link.first else link.receive_previous()))


def only_the_first_listens(stage, micro_batches, loss_fn, link):
    kept = []
    for x, y in micro_batches:
        x = x if link.first else link.receive_previous().requires_grad_()
        output = stage(x)
        if link.last:
            (loss_fn(output, y) * share_of_rows(x, micro_batches)).backward()
        else:
            link.send_next(output.detach())
            kept.append(output)
    for output in kept:
        output.backward(link.receive_next())


def all_at_once(stage, micro_batches, loss_fn, link):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    x = x if link.first else link.receive_previous().requires_grad_()
    output = stage(x)
    if link.last:
        loss = loss_fn(output, y)
        loss.backward()
    else:
        link.send_next(output.detach())
        output.backward(link.receive_next())
    if not link.first:
        link.send_previous(x.grad)
    return loss.item() if link.last else None


def in_phases(*, late_sends=False, one_backward=False, shift=0, last_output=False, twice=False):
    def pipeline_step(stage, micro_batches, loss_fn, link):
        m = len(micro_batches)
        xs = [x for x, _ in micro_batches] if link.first else []
        outputs, total = [], 0.0
        for i in range(m):
            if not link.first:
                xs.append(link.receive_previous().requires_grad_())
            outputs.append(stage(xs[i]))
            if twice:
                stage(xs[i])
            if not link.last and not late_sends:
                link.send_next(outputs[i].detach())
        if late_sends and not link.last:
            for output in outputs:
                link.send_next(output.detach())
        if link.last:
            targets = [y for _, y in micro_batches]
            shares = [share_of_rows(x, micro_batches) for x in xs]
            losses = [loss_fn(outputs[i], targets[(i + shift) % m]) * shares[i] for i in range(m)]
            total = sum(losses)
            if one_backward:
                total.backward()
        for i in range(m):
            if link.last and not one_backward:
                losses[i].backward()
            elif not link.last:
                outputs[-1 if last_output else i].backward(link.receive_next())
            if not link.first:
                link.send_previous(xs[i].grad)
        return total.item() if link.last else None

    return pipeline_step
