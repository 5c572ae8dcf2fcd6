"""Whether a small network can predict what full prefill changes in reused keys and values (after CacheRepair, arXiv
2609.35139).

    python samples/tools/repairer.py draw STORE BATCH.jsonl FOLDER --prompts N  # stored and joint KV of drawn prompts
    python samples/tools/repairer.py fit FOLDER OUT.pt                          # a linear map a layer, and a network
    python samples/tools/repairer.py judge OUT.pt STORE BATCH.jsonl OUT.jsonl --limit N
    python samples/tools/repairer.py table OUT.jsonl …  # of one set

`draw` puts random documents of the store together. A layer's map takes a token's un-rotated keys and values and the
mean over all earlier chunks; the network (block-causal: a token sees itself and earlier chunks) takes the keys and
values of all layers, and learns what the maps leave. `judge` adds the predicted change to the rows that are read and
measures the KL of the answer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.store import Store
from kvtool.core.evaluate.reference import Reference
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import read_batch
from kvtool.core.session.session import Session
from kvtool.reports.intervals import interval

OPTIONS = QueryOptions(max_tokens=20, level="raw")


def rows_of(decoder, plan, cache):
    """Return the un-rotated keys and values of the chunks' rows, `[tokens, layers, 2, heads · dim]`."""
    where = plan.hit_rows().nonzero()[:, 0]
    table = decoder.rotary.table(plan.positions[where]).inverse()
    out = []
    for layer, buffer in enumerate(cache.buffers):
        keys, values = (side[0].index_select(1, where).float() for side in (buffer.keys, buffer.values))
        keys = decoder.rotary.rotate(keys[None].contiguous(), table, layer)[0]
        out.append(torch.stack([side.transpose(0, 1).flatten(1) for side in (keys, values)], 1))
    return torch.stack(out, 1)


def chunks_of(plan):
    """Number the chunk of each of these rows."""
    stops = torch.tensor([chunk.stop for chunk in plan.cached_chunks])
    return torch.searchsorted(stops, plan.hit_rows().nonzero()[:, 0], right=True)


def draw(given):
    rng = random.Random(given.seed)
    given.out.mkdir(exist_ok=True, parents=True)
    with Store.open(given.store) as store:
        session = Session.open(store, ModelOptions())
        asked = read_batch(given.batch)
        names = sorted({name for one in asked for name in one.documents})
        for number in range(given.prompts):
            some = tuple(rng.sample(names, rng.randint(given.fewest, given.most)))
            request = replace(rng.choice(asked), documents=some)
            path = given.out / f"{number:04}.pt"
            if path.exists():
                continue
            plan = lay_out(session, request, OPTIONS).plan
            stored, joint = (
                rows_of(session.decoder, plan, fuse(session.decoder, plan, mode, session.source).cache)
                for mode in (Reuse(), Full())
            )
            torch.save((stored.half(), (joint - stored).half(), chunks_of(plan)), path)
            print(number, tuple(stored.shape), file=sys.stderr, flush=True)


class Net(nn.Module):
    """A block-causal transformer over tokens; its output begins at 0."""

    def __init__(self, numbers, width=256, depth=2, heads=4):
        super().__init__()
        self.into, self.out = nn.Linear(numbers, width), nn.Linear(width, numbers)
        nn.init.zeros_(self.out.weight), nn.init.zeros_(self.out.bias)
        self.heads = heads
        parts = {"n1": (nn.RMSNorm, width), "qkv": (nn.Linear, width, 3 * width), "o": (nn.Linear, width, width)}
        parts |= {"n2": (nn.RMSNorm, width), "up": (nn.Linear, width, 2 * width), "down": (nn.Linear, 2 * width, width)}
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: kind(*sizes) for name, (kind, *sizes) in parts.items()}) for _ in range(depth)
        )

    def forward(self, x, chunk):
        h = self.into(x)
        mask = (chunk[:, None] > chunk[None]) | torch.eye(len(chunk), dtype=torch.bool)
        for b in self.blocks:
            q, k, v = b["qkv"](b["n1"](h)).view(len(h), 3, self.heads, -1).permute(1, 2, 0, 3)
            h = h + b["o"](F.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1).flatten(1))
            h = h + b["down"](F.gelu(b["up"](b["n2"](h))))
        return self.out(h)


def features(stored, chunk):
    """Return the inputs of the maps, `[layers, tokens, numbers]`."""
    flat, count = stored.flatten(1), int(chunk.max()) + 1
    sums = torch.zeros(count, flat.shape[1]).index_add_(0, chunk, flat)
    sizes = torch.bincount(chunk, minlength=count).float()[:, None]
    before = (sums.cumsum(0) - sums) / (sizes.cumsum(0) - sizes).clamp(1)
    first = (chunk == 0).float()[:, None, None].expand(-1, stored.shape[1], 1)
    parts = [stored.flatten(2), before.view(count, *stored.shape[1:])[chunk].flatten(2), first, torch.ones_like(first)]
    return torch.cat(parts, 2).transpose(0, 1)


@torch.no_grad()
def mapped(state, stored, chunk):
    if state.get("scaled"):
        stored = ((stored.flatten(1) - state["mean"]) / state["spread"]).view_as(stored)
    return (features(stored, chunk) @ state["ridge"].float()).transpose(0, 1).unflatten(2, stored.shape[2:])


@torch.no_grad()
def predicted(net, state, stored, chunk):
    out = net((stored.flatten(1) - state["mean"]) / state["spread"], chunk).view_as(stored) * state["size"]
    return out + mapped(state, stored, chunk) if state.get("over") else out


@torch.no_grad()
def explained(files, how, size):
    """Return the share of the squared change that is predicted, of keys and values: mean of layers, and of each."""
    left = whole = 0
    for f in files:
        s, c, k = torch.load(f)
        left = left + ((c.float() - how(s.float(), k)) / size).square().sum((0, 3))
        whole = whole + (c.float() / size).square().sum((0, 3))
    share = (1 - left / whole)[1:]  # layer 0 changes by rounding only
    layers = [[round(x, 2) for x in side] for side in share.T.tolist()]
    return [round(x, 3) for x in share.mean(0).tolist()], layers


def fit(given):
    files = [f for folder in given.folders for f in sorted(folder.glob("*.pt"))]
    held, train = files[: given.held], files[given.held :]
    some = [torch.load(f) for f in train[:: max(1, len(train) // 20)]]
    x, y = torch.cat([s.float().flatten(1) for s, _, _ in some]), torch.cat([c.float() for _, c, _ in some])
    size = y.square().mean((0, 3), keepdim=True).sqrt() + 1e-6  # of the change, by layer and side
    state = {"mean": x.mean(0), "spread": x.std(0) + 1e-3, "size": size}
    gram = moment = 0
    for f in () if given.out.exists() else train:
        s, c, k = torch.load(f)
        a = features(((s.float().flatten(1) - state["mean"]) / state["spread"]).view(s.shape), k)
        gram = gram + a.transpose(1, 2) @ a
        moment = moment + a.transpose(1, 2) @ c.float().flatten(2).transpose(0, 1)
    if given.out.exists():
        state = {name: value for name, value in torch.load(given.out).items() if name in ("ridge", "scaled", *state)}
    else:
        eye = torch.eye(gram.shape[1]) * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * given.ridge
        state["ridge"] = torch.linalg.solve(gram + eye, moment).half()
        state["scaled"] = True
    print("offset", explained(held, lambda s, k: y.mean(0).expand_as(s), size)[0], flush=True)
    print("map", explained(held, lambda s, k: mapped(state, s, k), size), flush=True)
    size = state["size"]
    torch.save(state, given.out)
    net, total, step, started = Net(x.shape[1], given.width), given.epochs * len(train), 0, time.time()
    optimiser = torch.optim.AdamW(net.parameters(), given.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, given.rate, max(2, total), pct_start=0.1)
    state["over"] = True  # the network learns what the map leaves
    for epoch in range(given.epochs):
        for f in random.Random(epoch).sample(train, len(train)):
            s, c, k = torch.load(f)
            wanted = (c.float() - mapped(state, s.float(), k)) / size
            out = net((s.float().flatten(1) - state["mean"]) / state["spread"], k).view_as(c)
            optimiser.zero_grad()
            (out - wanted).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step(), schedule.step()
            step += 1
        score = explained(held, lambda s, k: predicted(net, state, s, k), size)
        print("epoch", epoch, f"{step} steps, {time.time() - started:.0f} s", score, flush=True)
        torch.save(state | {"net": net.state_dict(), "width": given.width}, given.out)


class Repaired:
    """A source (KVSource) that adds a change to the keys and values of another."""

    def __init__(self, source, plan, change):
        self.source, self.change, where = source, change, plan.hit_rows().nonzero()[:, 0].tolist()
        self.at = {row: number for number, row in enumerate(where)}

    def read(self, segments, layer, stats):
        out = []
        for segment, kv in zip(segments, self.source.read(segments, layer, stats), strict=True):
            at = self.at.get(segment.start)
            if at is not None:
                change = self.change[at : at + len(segment.ids), layer]
                sides = (change[:, n].unflatten(1, (kv[n].shape[0], -1)).transpose(0, 1) for n in (0, 1))
                kv = tuple((side.float() + more).to(side.dtype) for side, more in zip(kv, sides, strict=True))
            out.append(kv)
        return out


def judge(given):
    state = torch.load(given.net)
    net = None
    if "net" in state:
        net = Net(len(state["mean"]), state["width"])
        net.load_state_dict(state["net"])
    done = len(given.out.read_text().splitlines()) if given.out.exists() else 0
    with Store.open(given.store) as store, given.out.open("a") as out:
        session = Session.open(store, ModelOptions())
        decoder, source = session.decoder, session.source
        for request in read_batch(given.batch)[given.skip : given.skip + given.limit][done:]:
            plan = lay_out(session, request, OPTIONS).plan
            full = fuse(decoder, plan, Full(), source, reserve=20)
            joint, reference, row = rows_of(decoder, plan, full.cache), Reference.answered(decoder, full, 20), {}
            reused = fuse(decoder, plan, Reuse(), source)
            stored, chunk = rows_of(decoder, plan, reused.cache), chunks_of(plan)
            changes = {"": None, "map": mapped(state, stored, chunk), "truth": joint - stored}
            if net is not None:
                changes["net"] = predicted(net, state, stored, chunk)
            for name, change in ((name, change) for name, change in changes.items() if name not in given.without):
                read = source if change is None else Repaired(source, plan, change)
                for ratio in (0,) if name == "truth" else (0, *given.ratios):
                    fused = fuse(decoder, plan, Union(ratio) if ratio else Reuse(), read, reserve=20)
                    mode = f"{name} {f'union:{ratio:.0%}' if ratio else 'reuse'}".strip()
                    distance = reference.force(fused).distance
                    row[mode] = [distance.kl_answer, distance.kl_first]
            print(json.dumps(row), file=out, flush=True)
            print({mode: round(kl[0], 3) for mode, kl in row.items()}, file=sys.stderr, flush=True)


def table(given):
    rows = [json.loads(line) for path in given.results for line in path.read_text().splitlines()]
    modes = [mode for mode in rows[0] if all(mode in row for row in rows)]
    base = {mode: [row[mode][0] for row in rows] for mode in modes}
    print(f"{len(rows)} questions\n\n| run | KL answer | less `reuse` | less `union` 5 % | of `reuse` |")
    for mode, values in base.items():
        less = [[a - b for a, b in zip(values, base[other], strict=True)] for other in ("reuse", "union:5%")]
        texts = []
        for sign, cell in zip(("", "+", "+"), (values, *less), strict=True):
            low, high = interval(cell)
            texts.append(f"{sum(cell) / len(cell):{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]")
        print(f"| {mode} | {' | '.join(texts)} | {sum(values) / sum(base['reuse']):.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    judged = [("net", Path), ("store", Path), ("batch", Path), ("out", Path), ("--limit", 60), ("--skip", 0)]
    fitted = [("folders", [Path]), ("out", Path), ("--epochs", 4), ("--held", 12), ("--width", 256), ("--rate", 1e-3)]
    drawn = [("store", Path), ("batch", Path), ("out", Path), ("--prompts", 200), ("--seed", 0), ("--fewest", 4)]
    arguments = {
        draw: [*drawn, ("--most", 8)],
        fit: [*fitted, ("--ridge", 1e-2)],
        judge: [*judged, ("--ratios", [0.05, 0.15]), ("--without", ["truth"])],
        table: [("results", [Path])],
    }
    for run, wanted in arguments.items():
        one = commands.add_parser(run.__name__)
        for name, value in wanted:
            more = {"nargs": "+"} if isinstance(value, list) else {}
            kind = value[0] if more else value
            if kind is Path:
                one.add_argument(name, type=Path, **more)
            else:
                one.add_argument(name, type=type(kind), default=value, **more)
        one.set_defaults(run=run)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
