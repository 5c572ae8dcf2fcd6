// Elements of the page. Text that is given as `Said` is told again when the reader switches the language.

import { Said, isKnown, t } from "./text.js";

const texts = new WeakMap(); // what a text node says
const names = new WeakMap(); // what the attributes of an element say
const STATIC = ["aria-label", "placeholder", "title"]; // attributes of the HTML that people read

export const $ = (id) => document.getElementById(id);

/** Make an element. `attributes`: `onclick` and the like are listeners, `true` is one without a value. */
export function h(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) tell(node, key, value === true ? "" : value);
  }
  return put(node, ...children);
}

/** Replace what an element contains. */
export function put(element, ...children) {
  element.replaceChildren(...children.filter((child) => child != null && child !== false).map(nodeOf));
  return element;
}

function nodeOf(child) {
  if (!(child instanceof Said)) return child;
  const node = document.createTextNode(child);
  texts.set(node, child);
  return node;
}

/** Set an attribute. */
export function tell(element, name, value) {
  element.setAttribute(name, value);
  if (value instanceof Said) names.set(element, { ...names.get(element), [name]: value });
}

/** Make the texts of the HTML follow the language. */
export function tellHtml() {
  for (const node of everything()) {
    if (node.nodeType === Node.TEXT_NODE) {
      const text = node.data.trim().replace(/\s+/g, " ");
      if (isKnown(text)) texts.set(node, t(`${/^\s*/.exec(node.data)}{0}${/\s*$/.exec(node.data)}`, t(text)));
      continue;
    }
    for (const name of STATIC) if (isKnown(node.getAttribute(name))) tell(node, name, t(node.getAttribute(name)));
  }
}

/** Tell everything in the language that is now the page's. */
export function tellAgain() {
  for (const node of everything()) {
    if (texts.has(node)) node.data = texts.get(node);
    for (const [name, said] of Object.entries(names.get(node) ?? {})) node.setAttribute(name, said);
  }
}

function everything() {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) found.push(walker.currentNode);
  return found;
}

/** Return the language of a text as far as its script tells it; "" if it may be any. */
export function langOf(text) {
  if (/\p{Script=Hangul}/u.test(text)) return "ko";
  if (/[\p{Script=Hiragana}\p{Script=Katakana}]/u.test(text)) return "ja";
  if (/\p{Script=Han}/u.test(text)) return "zh";
  return "";
}

/** Return the attributes of an element for foreign text. */
export const foreign = (text, more) => ({ lang: langOf(text), dir: "auto", ...more });

/** Return a list of words with what they mean, to be opened. */
export function words(title, rows) {
  const list = rows.flatMap(([word, meaning]) => [h("dt", {}, word), h("dd", {}, meaning)]);
  return h("details", { class: "words" }, h("summary", {}, title), h("dl", {}, ...list));
}
