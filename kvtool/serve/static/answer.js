// What is shown of an answer once it is complete: citations, sources, tokens, times, the map of recomputed tokens.

import { $, foreign, h, put, tell, words } from "./elements.js";
import { errorSaid, events, why } from "./server.js";
import { counted, join, plural, seconds, t } from "./text.js";

const KINDS = [
  [
    "resident",
    t("kept from earlier turns"),
    t("The conversation so far: the server still has it in memory, so that nothing is read or computed."),
  ],
  ["reused", t("reused"), t("Computed when the document was added, and only read from the store for this answer.")],
  [
    "recomputed",
    t("recomputed"),
    t("Read from the store, and computed again, because these passages stand next to each other here."),
  ],
  ["fresh", t("fresh"), t("Not in the store: your question, and what was missing.")],
];
const WORDS = [
  [t("token"), t("A short word or a part of one: models read and write texts in such pieces.")],
  [
    t("keys and values (KV)"),
    t(
      "What the model computes for each token that it reads. kvtool keeps them on disk, so that a passage is computed once, and not for each question.",
    ),
  ],
  [
    t("full prefill"),
    t(
      "Reading the whole prompt without the store: every token is computed. It is what other programs do, and the time that kvtool saves.",
    ),
  ],
  ...KINDS.map(([, name, meaning]) => [name, meaning]),
  [t("fusion mode"), t("The rule that says which tokens of the stored passages are computed again.")],
];
const REASONS = {
  hole: t("missing in the store"),
  "link token": t("first tokens of a passage, which join it to the one before"),
  deviation: t("tokens that would differ most from what is stored"),
  "question attention": t("tokens that the question looks at most"),
  "after the exact prefix": t("after the beginning that is the same as in the store"),
  "full recompute": t("everything, as the fusion mode says"),
  dropped: t("left out by its compression level: neither read nor computed"),
};

/** Show what belongs to a complete answer. `ask`: asks the same question in another way. */
export function showFacts(article, number, answer, about, ask) {
  const chunks = [...about.chunks, ...(about.resident_chunks ?? [])].sort((a, b) => (b.score ?? 0) - (a.score ?? 0));
  const text = article.querySelector(".text");
  put(text, ...cited(answer, about.citations ?? [], number));
  Object.entries(foreign(answer)).forEach(([name, value]) => text.setAttribute(name, value));
  const facts = h("div", { class: "facts" });
  if (!answer) facts.append(h("p", { class: "note" }, t("The model ended its answer without a word.")));
  facts.append(...[...notes(about)].map((note) => h("p", { class: "note" }, note)));
  if (about.verified?.corrected) facts.append(draft(about.verified.draft));
  if (chunks.length) facts.append(sources(chunks, about.citations ?? [], number));
  facts.append(work(about, ask), words(t("What do these words mean?"), WORDS));
  article.append(facts);
}

function* notes(about) {
  if (about.retrieval === "none") yield t("No passage has a word of the question: no document supports this answer.");
  if (about.finish === "length") yield t("The answer was cut off at its longest length.");
  if (about.finish === "repeat") yield t("The answer was ended because it repeated itself.");
  const checked = about.verified;
  if (checked?.corrected)
    yield t(
      "Full prefill checked the answer and corrected it after {0} of {1} tokens.",
      counted(checked.accepted),
      counted(checked.drafted),
    );
  else if (checked) yield t("Full prefill checked the answer: it gives the same.");
  const told = (about.warnings ?? []).map(errorSaid);
  yield* new Map(told.map((said) => [String(said), said])).values(); // each once
}

function draft(text) {
  const shown = h("p", foreign(text, { class: "passage" }), text);
  return h("details", {}, h("summary", {}, t("Answer before its correction")), shown);
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
const linkId = (number, citation) => `a${number}-l${citation.answer_end}`; // several sentences can cite one
const cameFrom = new Map(); // the link by which the reader came to a mark

/** Lead the reader to an element, which stays outlined until the next one. */
function lead(id) {
  const target = $(id);
  for (let up = target; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  document.querySelector(".led")?.classList.remove("led");
  target.classList.add("led");
  target.scrollIntoView({ block: "center" });
  target.focus({ preventScroll: true });
}

function link(one, number) {
  const [mark, place] = [markId(number, one), placeOf(one)];
  const go = (event) => {
    event.preventDefault();
    cameFrom.set(mark, linkId(number, one));
    lead(mark);
  };
  const label = t("Citation {0}: {1}", one.number, place);
  const attributes = { id: linkId(number, one), href: `#${mark}`, "aria-label": label, title: place };
  return h("a", { class: "cite", onclick: go, ...attributes }, `[${one.number}]`);
}

/** Return the link from a mark to the citation by which the reader came, else to the last one that has its number. */
function back(one, number) {
  const go = (event) => {
    event.preventDefault();
    lead(cameFrom.get(markId(number, one)) ?? linkId(number, one));
  };
  const label = t("Back to citation {0} in the answer", one.number);
  const attributes = { href: `#${linkId(number, one)}`, "aria-label": label, title: label };
  return h("a", { class: "cite", onclick: go, ...attributes }, `[${one.number}]\u00a0↩`);
}

const nameOf = (source) => source.split("/").pop();

function placeOf(chunk) {
  const place = chunk.label || (chunk.line == null ? "" : t("line {0}", chunk.line));
  return place ? join([nameOf(chunk.source), place], ", ") : nameOf(chunk.source);
}

function sources(chunks, citations, number) {
  const items = chunks.map((chunk) => h("li", {}, source(chunk, citations, number)));
  const proof =
    citations.length > 0 &&
    t(
      "A number in the answer leads to the sentence that has most words in common with it. That is no proof: a made-up sentence gets a number, too.",
    );
  return h(
    "details",
    { class: "sources" },
    h("summary", {}, plural(chunks.length, "{0} source", "{0} sources")),
    proof && h("p", { class: "dim" }, proof),
    h("ol", {}, ...items),
  );
}

function source(chunk, citations, number) {
  const own = new Map(citations.filter((one) => one.chunk === chunk.id).map((one) => [one.number, one]));
  const about = [
    own.size && t("cited as {0}", [...own.keys()].map((each) => `[${each}]`).join(" ")),
    chunk.staleness === "changed" && t("the file has changed since"),
    chunk.staleness === "deleted" && t("the file is gone"),
    chunk.origin && t("from {0}", chunk.origin),
  ];
  return h(
    "details",
    {},
    h(
      "summary",
      {},
      h("bdi", foreign(chunk.source), placeOf(chunk)),
      " ",
      h("span", { class: "dim" }, join(about, ", ")),
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
      others.push(h("p", foreign(one.text, { class: "passage" }), mark(one.text), " ", back(one, number)));
      continue;
    }
    nodes.push(letters.slice(done, start).join(""), mark(text), " ", back(one, number));
    done = end;
  }
  nodes.push(letters.slice(done).join(""));
  return h("div", {}, h("p", foreign(chunk.text, { class: "passage" }), ...nodes), ...others);
}

// ---- tokens and times ----

function work(about, ask) {
  const { tokens, timing_ms: timing } = about;
  const kinds = KINDS.filter(([kind]) => tokens[kind]);
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  const legend = h("span", { class: "legend" });
  for (const [kind, name, meaning] of kinds) {
    const part = h("span", { class: kind, title: meaning });
    part.style.flexGrow = tokens[kind];
    bar.append(part);
    const said = t("{0} {1}", counted(tokens[kind]), name);
    legend.append(h("span", { title: meaning }, h("i", { class: `swatch ${kind}` }), said));
  }
  const first = h("span", { class: "began" });
  const waited = timing.queue >= 50 && t("The question waited {0} for its turn, in addition.", seconds(timing.queue));
  const others =
    timing.others >= 50 && t("Other answers took {0} of the time to the first token.", seconds(timing.others));
  return h(
    "details",
    { class: "work" },
    h("summary", {}, first, bar, legend),
    times(about, ask, (text) => put(first, text)),
    waited && h("p", { class: "dim" }, waited),
    others && h("p", { class: "dim" }, others),
    h("p", {}, t("The prompt has {0} tokens; fusion mode: {1}.", counted(tokens.prompt), about.fusion)),
    map(about),
  );
}

/** Return the bars of the time to the first token and of full prefill, once that is measured. `tell`: shows them in a
 *  line. */
function times(about, ask, tell) {
  const { tokens, timing_ms: timing, verified } = about;
  const box = h("div", { class: "times", role: "group", "aria-label": t("Time to the first token") });
  const draw = (full, how) => {
    const longest = Math.max(timing.ttft, full ?? 0, 1e-6);
    const row = (name, ms, colour) => {
      const bar = h("span", { class: `time ${colour}` });
      bar.style.width = `${(100 * ms) / longest}%`;
      const track = h("span", { class: "track", "aria-hidden": "true" }, bar);
      return [h("span", {}, name), track, h("span", {}, seconds(ms))];
    };
    const rows = row(t("this answer"), timing.ttft, "reused");
    if (full != null) rows.push(...row(t("full prefill, measured"), full, "fresh"));
    const turns = full != null && tokens.resident && t("It computes earlier turns, too.");
    put(box, ...rows, h("p", { class: "dim" }, join([verdict(timing.ttft, full), how, turns])));
    tell(began(timing.ttft, full));
  };
  if (about.fusion === "full") {
    draw(null, t("This answer is full prefill’s: nothing was reused."));
    return box;
  }
  const isMeasured = verified?.timing_ms.prefill > 0;
  if (isMeasured) draw(verified.timing_ms.prefill + timing.retrieve, t("Measured, by the check of this answer."));
  else draw(null, null);
  return isMeasured ? box : h("div", {}, box, measuring(ask, draw));
}

function began(ours, full) {
  if (full == null) return t("Began after {0}", seconds(ours));
  return t("Began after {0} · {1}", seconds(ours), t("without the store {0} (measured)", seconds(full)));
}

function verdict(ours, full) {
  if (full == null) return null;
  if (full / ours > 1.1)
    return t("Full prefill takes {0} times as long as this answer took.", (full / ours).toFixed(1));
  return t("Full prefill takes no longer here: a short prompt gains little from the store.");
}

const measuredHow = (kept) =>
  kept
    ? plural(
        kept,
        "Measured just now; {0} token of earlier turns was kept.",
        "Measured just now; {0} tokens of earlier turns were kept.",
      )
    : t("Measured just now, for the same question.");

function measuring(ask, draw) {
  const said = h("span", { role: "status", class: "dim" });
  const measure = async () => {
    button.disabled = true;
    put(said, " ", t("Full prefill runs…"));
    try {
      for await (const event of events(await ask({ fusion: "full" }, { max_tokens: 1 }))) {
        if (event.kvtool) draw(event.kvtool.timing_ms.ttft, measuredHow(event.kvtool.turn?.cached));
      }
      put(said);
      button.remove();
    } catch (error) {
      put(said, " ", why(error));
      button.disabled = false;
    }
  };
  const button = h("button", { type: "button", class: "small", onclick: measure }, t("Measure full prefill"));
  return h("p", {}, button, said);
}

// ---- the map ----

const length = (span) => span.token_end - span.token_start;
const kindOf = (span) => (span.reason === "dropped" ? "dropped" : span.reason ? "recomputed" : "reused");
const reasonOf = (span) => REASONS[span.reason] ?? span.reason;

/** Return the passages in the order of the prompt, with the recomputed tokens marked. */
function map(about) {
  const chunks = about.chunks.filter((chunk) => chunk.explanation);
  if (!chunks.length) return false;
  const counts = countsOf(chunks);
  const sum = (entries) => entries.reduce((total, [, count]) => total + count, 0);
  const total = sum(Object.entries(counts));
  const computed = sum(Object.entries(counts).filter(([reason]) => kindOf({ reason }) === "recomputed"));
  const label = t("{0} of the passages’ {1} tokens were computed for this answer.", counted(computed), counted(total));
  const body = h("div", {});
  const details = h("details", { class: "map" }, h("summary", {}, t("Map of recomputed tokens")), body);
  details.addEventListener("toggle", () => {
    if (!details.open || body.firstChild) return;
    const chosen = h(
      "p",
      { class: "dim chosen", role: "status" },
      t("Tap a mark for its reason. Your question is not shown."),
    );
    body.append(h("p", {}, label), strip(chunks, total, label), legendOf(counts), chosen);
    for (const chunk of chunks) {
      const text = chunk.explanation.spans.map((span) => marked(span, placeOf(chunk), chosen));
      body.append(h("h3", {}, placeOf(chunk)), h("p", foreign(chunk.text, { class: "passage" }), ...text));
    }
  });
  return details;
}

/** Return the tokens by reason. A mark has whole characters, some of whose tokens may have been reused. */
function countsOf(chunks) {
  const counts = { "": 0 };
  const add = (reason, count) => (counts[reason] = (counts[reason] ?? 0) + count);
  for (const { reasons, spans } of chunks.map((chunk) => chunk.explanation)) {
    for (const span of spans) add(span.reason === "dropped" ? "dropped" : "", length(span));
    for (const [reason, count] of Object.entries(reasons)) {
      add(reason, count);
      add("", -count);
    }
  }
  return counts;
}

/** Return the colours of the map, with how many tokens each has and why. */
function legendOf(counts) {
  const rows = Object.keys(counts).sort().map((reason) => {
    const [count, why, kind] = [counted(counts[reason]), reasonOf({ reason }), kindOf({ reason })];
    const said = {
      reused: t("{0} reused", count),
      recomputed: t("{0} recomputed: {1}", count, why),
      dropped: t("{0} {1}", count, why),
    };
    return h("li", {}, h("i", { class: `swatch ${kind}` }), said[kind]);
  });
  return h("ul", { class: "reasons" }, ...rows);
}

function marked(span, place, chosen) {
  if (!span.reason) return span.text;
  const why = t("tokens {0} to {1}: {2}", counted(span.token_start + 1), counted(span.token_end), reasonOf(span));
  const show = () => put(chosen, place, ", ", why);
  return h("mark", { class: kindOf(span), title: why, onclick: show }, span.text);
}

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
  });
  tell(picture, "aria-label", label);
  let at = 0;
  for (const chunk of chunks) {
    for (const span of chunk.explanation.spans) {
      picture.append(draw("rect", { x: at, y: 0, width: length(span), height: 1, class: kindOf(span) }));
      at += length(span);
    }
    at += gap;
  }
  return picture;
}
