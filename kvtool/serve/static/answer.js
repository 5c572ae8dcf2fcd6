// What is shown of an answer once it is complete: citations, sources, tokens, times, the map of recomputed tokens.

import { $, Failure, counted, events, foreign, h, plural, request, seconds } from "./server.js";

const KINDS = [
  ["standing", "kept from earlier turns", "The conversation cache has them: nothing is read or computed."],
  ["reused", "reused", "Their keys and values were read from the store."],
  ["recomputed", "recomputed", "They were read, and computed again to fit these passages."],
  ["fresh", "fresh", "No store has them: the question, and what was missing."],
];
const REASONS = { hole: "missing in the store", dropped: "left out by its compression level" };

/** Show what belongs to a complete answer. `ask`: asks the same question in another way. */
export function showFacts(article, number, answer, about, prefill, ask) {
  const chunks = [...about.chunks, ...(about.again ?? [])].sort((a, b) => (b.score ?? 0) - (a.score ?? 0));
  const text = article.querySelector(".text");
  text.replaceChildren(...cited(answer, about.citations ?? [], number));
  Object.entries(foreign(answer)).forEach(([name, value]) => text.setAttribute(name, value));
  const facts = h("div", { class: "facts" });
  if (!answer) facts.append(h("p", { class: "note" }, "The model ended its answer without a word."));
  facts.append(...[...notes(about)].map((note) => h("p", { class: "note" }, note)));
  if (about.verified?.corrected) facts.append(draft(about.verified.draft));
  if (chunks.length) facts.append(sources(chunks, about.citations ?? [], number));
  facts.append(work(about, prefill, ask));
  article.append(facts);
}

function* notes(about) {
  if (about.retrieval === "none") yield "No passage has a word of the question: no document supports this answer.";
  if (about.finish === "length") yield "The answer was cut off at its longest length.";
  if (about.finish === "repeat") yield "The answer was ended because it repeated itself.";
  const checked = about.verified;
  if (checked?.corrected)
    yield `Full prefill checked the answer and corrected it after ${counted(checked.accepted)} of ${plural(checked.drafted, "token")}.`;
  else if (checked) yield "Full prefill checked the answer: it gives the same.";
  for (const warning of about.warnings ?? []) yield [warning.message, warning.hint].filter(Boolean).join(" – ");
}

function draft(text) {
  return h(
    "details",
    {},
    h("summary", {}, "Answer before its correction"),
    h("p", foreign(text, { class: "passage" }), text),
  );
}

// ---- citations and sources ----

/** Return the answer's nodes, with a link after each sentence that has a citation. Places are in characters, of which
 *  one can be two units of a JavaScript string. */
function cited(answer, citations, number) {
  const letters = Array.from(answer);
  const nodes = [];
  let done = 0;
  for (const one of citations) {
    nodes.push(letters.slice(done, one.answer_end).join(""), " ", link(one, number));
    done = one.answer_end;
  }
  return [...nodes, letters.slice(done).join("")];
}

const markId = (number, citation) => `a${number}-c${citation.number}`;

function link(one, number) {
  const id = markId(number, one);
  const label = `Citation ${one.number}: ${placeOf(one)}`;
  const go = (event) => {
    event.preventDefault();
    const mark = $(id);
    for (let up = mark; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
    mark.scrollIntoView({ block: "center" });
    mark.focus();
  };
  return h(
    "a",
    { class: "cite", href: `#${id}`, "aria-label": label, title: placeOf(one), onclick: go },
    `[${one.number}]`,
  );
}

const nameOf = (source) => source.split("/").pop();

function placeOf(chunk) {
  const place = chunk.label || (chunk.line == null ? "" : `line ${chunk.line}`);
  return place ? `${nameOf(chunk.source)}, ${place}` : nameOf(chunk.source);
}

function sources(chunks, citations, number) {
  const items = chunks.map((chunk) => h("li", {}, source(chunk, citations, number)));
  return h("details", { class: "sources" }, h("summary", {}, plural(chunks.length, "source")), h("ol", {}, ...items));
}

function source(chunk, citations, number) {
  const own = new Map(citations.filter((one) => one.chunk === chunk.id).map((one) => [one.number, one]));
  const about = [
    own.size && `cited as ${[...own.keys()].map((each) => `[${each}]`).join(" ")}`,
    chunk.since_ingest === "changed" && "the file has changed since",
    chunk.since_ingest === "gone" && "the file is gone",
    chunk.origin && `from ${chunk.origin}`,
  ].filter(Boolean);
  return h(
    "details",
    {},
    h(
      "summary",
      {},
      h("bdi", foreign(chunk.source), placeOf(chunk)),
      " ",
      h("span", { class: "dim" }, about.join(", ")),
    ),
    h("p", { class: "dim path" }, h("bdi", {}, chunk.source)),
    passage(chunk, [...own.values()], number),
  );
}

/** Return a passage with its cited sentences marked; a sentence that is not found at its place has its text below. */
function passage(chunk, citations, number) {
  const letters = Array.from(chunk.text);
  const plain = (text) => text.split(/\s+/).filter(Boolean).join(" ");
  const nodes = [];
  const others = [];
  let done = 0;
  for (const one of citations.sort((a, b) => a.start - b.start)) {
    const [start, end] = [one.start - chunk.start, one.end - chunk.start];
    const text = letters.slice(start, end).join("");
    const mark = (said) => h("mark", { id: markId(number, one), tabindex: "-1" }, said);
    if (start < done || plain(text) !== one.text) {
      others.push(h("p", foreign(one.text, { class: "passage" }), `[${one.number}] `, mark(one.text)));
      continue;
    }
    nodes.push(letters.slice(done, start).join(""), mark(text), h("span", { class: "dim" }, ` [${one.number}]`));
    done = end;
  }
  nodes.push(letters.slice(done).join(""));
  return h("div", {}, h("p", foreign(chunk.text, { class: "passage" }), ...nodes), ...others);
}

// ---- tokens and times ----

function work(about, prefill, ask) {
  const { tokens, timing_ms: timing } = about;
  const kinds = KINDS.filter(([kind]) => tokens[kind]);
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  const legend = h("span", { class: "legend" });
  for (const [kind, name, why] of kinds) {
    const part = h("span", { class: kind });
    part.style.flexGrow = tokens[kind];
    bar.append(part);
    legend.append(h("span", { title: why }, h("i", { class: `swatch ${kind}` }), `${counted(tokens[kind])} ${name} `));
  }
  const first = h("span", {});
  return h(
    "details",
    { class: "work" },
    h("summary", {}, first, bar, legend),
    times(about, prefill, ask, (text) => (first.textContent = text)),
    timing.queue >= 50 &&
      h("p", { class: "dim" }, `The question waited ${seconds(timing.queue)} for its turn, in addition.`),
    timing.others >= 50 &&
      h("p", { class: "dim" }, `Other answers took ${seconds(timing.others)} of the time to the first token.`),
    h("p", {}, `The prompt has ${plural(tokens.prompt, "token")}; fusion mode: ${about.fusion}.`),
    h("ul", {}, ...kinds.map(([kind, name, why]) => h("li", {}, `${counted(tokens[kind])} ${name}. ${why}`))),
    map(about),
  );
}

/** Return the bars of the time to the first token and of full prefill: as measured, else as estimated. `tell`: shows
 *  them in a line. */
function times(about, prefill, ask, tell) {
  const { tokens, timing_ms: timing, verified } = about;
  const box = h("div", { class: "times", role: "group", "aria-label": "Time to the first token" });
  const draw = (full, how, kind) => {
    const longest = Math.max(timing.ttft, full ?? 0, 1e-6);
    const row = (name, ms, colour) => {
      const bar = h("span", { class: `time ${colour}` });
      bar.style.width = `${(100 * ms) / longest}%`;
      return [
        h("span", {}, name),
        h("span", { class: "track", "aria-hidden": "true" }, bar),
        h("span", {}, seconds(ms)),
      ];
    };
    box.replaceChildren(...row("this answer", timing.ttft, "reused"));
    if (full != null) box.append(...row(`full prefill, ${kind}`, full, "fresh"));
    const turns = full != null && tokens.standing ? " It computes earlier turns, too." : "";
    box.append(h("p", { class: "dim" }, verdict(timing.ttft, full, how) + turns));
    tell(
      `First token after ${seconds(timing.ttft)}` + (full == null ? "" : `; full prefill: ${seconds(full)}, ${kind}`),
    );
  };
  if (about.fusion === "full") {
    draw(null, "This answer is full prefill’s: nothing was reused.");
    return box;
  }
  const isMeasured = verified?.timing_ms.prefill > 0;
  if (isMeasured)
    draw(verified.timing_ms.prefill + timing.retrieve, "Measured, by the check of this answer.", "measured");
  else if (prefill) draw(estimate(prefill, tokens.prompt) + timing.retrieve, HOW[prefill.source], "estimated");
  else draw(null, "How long full prefill takes is not known here yet.");
  return isMeasured ? box : h("div", {}, box, measuring(ask, draw));
}

const HOW = {
  passes: "Estimated from the speed of passes that was measured on this machine.",
  ingest: "Estimated: as many tokens at the speed of the last ingest, which is roughly right for long prompts.",
};

function estimate(prefill, rows) {
  return prefill.fixed + prefill.row * rows + (prefill.key * rows * (rows + 1)) / 2;
}

function verdict(ours, full, how) {
  if (full == null) return how;
  const ratio = full / ours;
  const said = ratio > 1.1 ? `${ratio.toFixed(1)} times as long as this answer` : "no longer than this answer";
  return `Full prefill: ${said}. ${how}`;
}

const measuredHow = (kept) =>
  kept
    ? `Measured just now; ${plural(kept, "token")} of earlier turns were kept.`
    : "Measured just now, for the same question.";

function measuring(ask, draw) {
  const said = h("span", { role: "status", class: "dim" });
  const measure = async () => {
    button.disabled = true;
    said.textContent = " Full prefill runs…";
    try {
      for await (const event of events(await ask({ fusion: "full" }, { max_tokens: 1 }))) {
        if (event.error) throw new Failure(event.error.message);
        if (event.kvtool) draw(event.kvtool.timing_ms.ttft, measuredHow(event.kvtool.turn?.kept), "measured");
      }
      said.textContent = "";
      button.remove();
    } catch (error) {
      said.textContent = ` ${error.message}`;
      button.disabled = false;
    }
  };
  const button = h("button", { type: "button", class: "small", onclick: measure }, "Measure full prefill");
  return h("p", {}, button, said);
}

// ---- the map ----

/** Return the passages in the order of the prompt, with the recomputed tokens marked. */
function map(about) {
  const chunks = about.chunks.filter((chunk) => chunk.explained);
  if (!chunks.length) return false;
  const spans = chunks.flatMap((chunk) => chunk.explained.spans);
  const length = (span) => span.token_end - span.token_start;
  const total = spans.reduce((sum, span) => sum + length(span), 0);
  const computed = spans
    .filter((span) => span.reason && span.reason !== "dropped")
    .reduce((sum, one) => sum + length(one), 0);
  const label = `${counted(computed)} of the passages’ ${counted(total)} tokens were computed for this answer.`;
  const body = h("div", {});
  const details = h("details", { class: "map" }, h("summary", {}, "Map of recomputed tokens"), body);
  details.addEventListener("toggle", () => {
    if (!details.open || body.firstChild) return;
    body.append(
      h("p", {}, `${label} Marked: `, h("mark", {}, "computed"), "; the instruction and the question are not shown."),
    );
    body.append(strip(chunks, total, label));
    for (const chunk of chunks) {
      const text = chunk.explained.spans.map((span) =>
        span.reason
          ? h(
              "mark",
              { class: kindOf(span), title: `tokens ${span.token_start + 1} to ${span.token_end}: ${why(span)}` },
              span.text,
            )
          : span.text,
      );
      body.append(h("h3", {}, placeOf(chunk)), h("p", foreign(chunk.text, { class: "passage" }), ...text));
    }
  });
  return details;
}

const kindOf = (span) => (span.reason === "dropped" ? "dropped" : "recomputed");
const why = (span) => REASONS[span.reason] ?? `recomputed (${span.reason})`;

function strip(chunks, total, label) {
  const draw = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));
    return node;
  };
  const gap = total / 300; // between two passages
  const width = total + gap * (chunks.length - 1);
  const picture = draw("svg", {
    viewBox: `0 0 ${width} 1`,
    preserveAspectRatio: "none",
    class: "strip",
    role: "img",
    "aria-label": label,
  });
  let at = 0;
  for (const chunk of chunks) {
    for (const span of chunk.explained.spans) {
      const tokens = span.token_end - span.token_start;
      picture.append(
        draw("rect", { x: at, y: 0, width: tokens, height: 1, class: span.reason ? kindOf(span) : "reused" }),
      );
      at += tokens;
    }
    at += gap;
  }
  return picture;
}
