"""Rounds in plain PyTorch, one model and one client at a time: the reference for copfl's speed."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Tensors = list[Tensor]


class PlainCoPfl:
    """CO-PFL with masked Adam per tensor, masks by one top-k over all parameters, and both scores."""

    def __init__(
        self, model: nn.Module, clients: int, rate: float = 0.25, budget: float = 0.5, lr: float = 1e-4
    ) -> None:
        self.model, self.rate, self.budget, self.lr = model, rate, budget, lr
        self.names = [name for name, _ in model.named_parameters()]
        self.server = [p.detach().clone() for p in model.parameters()]
        self.previous = [p.clone() for p in self.server]
        self.size = sum(p.numel() for p in self.server)
        zeros = [torch.zeros_like(p) for p in self.server]
        self.personal = [[p.clone() for p in self.server] for _ in range(clients)]
        self.masks = [[z.bool() for z in zeros] for _ in range(clients)]
        self.moments = [[[z.clone() for z in zeros] for _ in range(3)] for _ in range(clients)]
        self.buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(clients)]
        self.scores = [1.0] * clients

    def _load(self, values: Tensors, buffers: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for p, v in zip(self.model.parameters(), values, strict=True):
                p.copy_(v)
            for name, b in self.model.named_buffers():
                b.copy_(buffers[name])

    def _epoch(self, client: int, batches: list[tuple[Tensor, Tensor]], active: Tensors) -> None:
        u, v, t = self.moments[client]
        self.model.train()
        for x, y in batches:
            loss = F.cross_entropy(self.model(x), y)
            grads = torch.autograd.grad(loss, list(self.model.parameters()))
            with torch.no_grad():  # a masked gradient and a masked step, in PyTorch's grouped operations
                w = list(self.model.parameters())
                before = [[m.clone() for m in group] for group in (u, v)]
                torch._foreach_add_(t, active)
                torch._foreach_lerp_(u, grads, 0.1)
                torch._foreach_mul_(v, 0.999)
                torch._foreach_addcmul_(v, grads, grads, 0.001)
                for group, old in zip((u, v), before, strict=True):
                    for now, then, h in zip(group, old, active, strict=True):
                        now.copy_(torch.where(h, now, then))
                scale = torch._foreach_sqrt([a / (1 - 0.999**c) for a, c in zip(v, t, strict=True)])
                torch._foreach_add_(scale, 1e-8)
                step = torch._foreach_div([a / (1 - 0.9**c) for a, c in zip(u, t, strict=True)], scale)
                for p, s, h in zip(w, step, active, strict=True):
                    p.sub_(torch.where(h, self.lr * s, 0))

    def round(
        self, batches: list[list[list[tuple[Tensor, Tensor]]]], train: list[tuple[Tensor, Tensor]]
    ) -> None:
        """One round; batches[client][phase] are (x, y) on the device, train[client] all of its samples."""
        sums = [torch.zeros_like(p) for p in self.server]
        weights = [torch.zeros_like(p) for p in self.server]
        total = sum(self.scores)
        new_scores = []
        for n in range(len(self.personal)):
            mask = self.masks[n]
            start = [
                torch.where(m, o, s) for m, o, s in zip(mask, self.personal[n], self.server, strict=True)
            ]
            self._load(start, self.buffers[n])
            self._epoch(n, batches[n][0], mask)
            local = [p.detach().clone() for p in self.model.parameters()]
            self._load(start, self.buffers[n])
            self._epoch(n, batches[n][1], [~m for m in mask])
            w = [
                torch.where(m, a, p.detach())
                for m, a, p in zip(mask, local, self.model.parameters(), strict=True)
            ]
            self.buffers[n] = {name: b.clone() for name, b in self.model.named_buffers()}
            change = torch.cat([(a - b).abs().flatten() for a, b in zip(start, w, strict=True)])
            flat = torch.cat([m.flatten() for m in mask])
            moving = int((change > 0).logical_or(flat).sum())
            selected = int(flat.sum())
            free = max(int(self.budget * moving) - selected, 0)
            growth = min(int(self.rate * (moving - selected)), free)
            if growth:
                change[flat] = -1
                flat[torch.topk(change, growth).indices] = True
            sizes = [p.numel() for p in self.server]
            self.masks[n] = [f.view_as(p) for f, p in zip(flat.split(sizes), self.server, strict=True)]
            alpha = min(self.scores[n] / total, 1 - 1e-6)
            update = torch.cat([(a - b).flatten() for a, b in zip(start, w, strict=True)])
            step = torch.cat([(a - b).flatten() for a, b in zip(self.previous, self.server, strict=True)])
            others = (step - alpha * update) / (1 - alpha)
            leave_one_out = [
                (s - alpha * o) / (1 - alpha) for s, o in zip(self.server, self.personal[n], strict=True)
            ]
            self._load(leave_one_out, self.buffers[n])
            self.model.eval()
            with torch.no_grad():
                prediction = F.cross_entropy(self.model(train[n][0]), train[n][1])
            gradient = 1 - F.cosine_similarity(update, others, 0)
            score = float(gradient + prediction)
            new_scores.append(score)
            self.personal[n] = w
            for i, (m, a) in enumerate(zip(self.masks[n], w, strict=True)):
                sums[i] += score * torch.where(m, 0, a)
                weights[i] += score * ~m
        self.previous = self.server
        self.server = [
            torch.where(k > 0, s / k.clamp(min=1e-12), old)
            for s, k, old in zip(sums, weights, self.server, strict=True)
        ]
        self.scores = new_scores


def plain_fedavg_round(
    model: nn.Module, server: dict[str, Tensor], batches: list[list[tuple[Tensor, Tensor]]], lr: float
) -> dict[str, Tensor]:
    """One FedAvg round: load, train with torch.optim.SGD, add up; clients of equal size."""
    total: dict[str, Tensor] = {}
    for client in batches:
        model.load_state_dict(server)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model.train()
        for x, y in client:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            total[name] = total.get(name, 0) + value / len(batches)
    return total
