// Texts of the page in the reader's language. English ones are the keys: ko.js has the Korean ones.

import { KO } from "./ko.js";

const CHOICE = "kvtool-language";
const TABLES = { en: {}, ko: KO };
const NAMES = { en: "English", ko: "한국어" };
let table = TABLES.en;

/** A text that follows the language of the page, also after it is shown (elements.js). */
export class Said {
  constructor(text, values) {
    Object.assign(this, { text, values });
  }
  toString() {
    return (table[this.text] ?? this.text).replace(/\{(\d+)\}/g, (_, place) => String(this.values[place]));
  }
}

/** Several texts one after the other. */
class Joined extends Said {
  toString() {
    return this.values.join(this.text);
  }
}

/** Say a text with `{0}`, `{1}`, … replaced by values, which may be such texts, too. */
export const t = (text, ...values) => new Said(text, values);
/** Say a number of things: `one` if it is 1, else `more`. */
export const plural = (number, one, more) => t(number === 1 ? one : more, counted(number));
export const join = (parts, between = " ") => new Joined(between, parts.filter(Boolean));
export const isKnown = (text) => Object.hasOwn(KO, text);

// ---- the language ----

function kept() {
  try {
    return localStorage.getItem(CHOICE);
  } catch {
    return null;
  }
}

/** Return the language that the reader chose here, else the first of the browser's that the page has. */
export function firstLanguage() {
  const wanted = [kept(), ...navigator.languages.map((name) => name.split("-")[0].toLowerCase())];
  return wanted.find((name) => name && Object.hasOwn(TABLES, name)) ?? "en";
}

export function useLanguage(name) {
  table = TABLES[name];
  document.documentElement.lang = name;
}

export function keepLanguage(name) {
  try {
    localStorage.setItem(CHOICE, name);
  } catch {} // a browser that keeps nothing: the choice lasts as long as the page
}

/** Return the other language: its code and its own name. */
export function otherLanguage() {
  const other = document.documentElement.lang === "ko" ? "en" : "ko";
  return [other, NAMES[other]];
}

// ---- numbers ----

export const counted = (number) => Math.round(number).toLocaleString("en");
export const seconds = (ms) =>
  ms < 1000 ? t("{0} ms", ms.toFixed(ms < 10 ? 1 : 0)) : t("{0} s", (ms / 1000).toFixed(ms < 10000 ? 2 : 1));
export function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(bytes, 1)) / 3));
  const amount = (bytes / 1000 ** power).toFixed(power && bytes / 1000 ** power < 10 ? 1 : 0);
  return power ? `${amount} ${units[power]}` : t("{0} bytes", amount);
}
/** Return a text of the server as a sentence. */
export const sentence = (text) => {
  const [first = "", ...rest] = text;
  const said = first.toUpperCase() + rest.join("");
  return /[.!?)]$/.test(said) ? said : `${said}.`;
};
