// One text and its figures on the page. What comes between two frames is painted at once.

import { Pieces } from "./pieces.js";
import { ORIGINS, Tally } from "./tally.js";

const NAMES = { accepted: "accepted draft", correction: "correction", bonus: "bonus", plain: "plain" };
const MAX_ROUNDS = 64;
const HIDDEN_INTERVAL_MS = 250;

export class Pane {
  tally = new Tally();
  text = "";
  #pieces = new Pieces();
  #arrived = []; // pieces not painted yet
  #isScheduled = false;
  #isFirstPainted = false;
  #numRoundsPainted = 0;
  #startedAt = 0;
  #onPaint;

  /** `onPaint` is called after each painting. */
  constructor(name, { isPlain, onPaint }) {
    this.#onPaint = onPaint;
    const template = document.getElementById("pane");
    this.element = template.content.firstElementChild.cloneNode(true);
    this.element.setAttribute("aria-label", name);
    this.element.classList.toggle("is-plain", isPlain);
    this.#find(".name").textContent = name;
    this.#find(".text").setAttribute("aria-label", `Text, ${name.toLowerCase()}`);
    if (isPlain) {
      this.#find(".charts").remove();
      for (const figure of ["gamma", "yield", "drafter"]) this.#figure(figure).parentElement.remove();
      for (const item of this.element.querySelectorAll(".legend li:not([data-origin=plain])")) item.remove();
    }
  }

  /** The clock of the click is `performance.now()`. */
  begin(now) {
    this.#startedAt = now;
    this.setState("waiting");
  }

  /** idle, waiting, streaming, done, stopped or failed. */
  setState(state, note = "") {
    this.element.dataset.state = state;
    this.#find(".state").textContent = state;
    if (note) this.#find(".small").textContent = note;
  }

  /** New text and the rounds that made it. */
  add(text, steps, now) {
    if (this.element.dataset.state === "waiting") this.setState("streaming");
    for (const step of steps) {
      const round = this.tally.rounds.length + 1;
      const where = `round ${round}, γ ${step.num_draft_tokens}`;
      const titled = (token) => ({ ...token, title: `${NAMES[token.origin]}, ${where}, id ${token.id}` });
      this.#pieces.push(step.tokens.map(titled));
      this.tally.add(step, now);
    }
    this.text += text;
    this.#arrived.push(...this.#pieces.take(text));
    this.#schedule();
  }

  /** Paints what has not been painted yet. */
  paint() {
    this.#isScheduled = false;
    const isFirst = !this.#isFirstPainted && this.#arrived.length > 0;
    this.#paintText();
    this.#paintFigures();
    if (!this.element.classList.contains("is-plain")) {
      this.#paintPositions();
      this.#paintRounds();
    }
    if (isFirst) this.#tellFirst();
    this.#onPaint();
  }

  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    if (document.hidden) setTimeout(() => this.paint(), HIDDEN_INTERVAL_MS); // no frames are made then
    else requestAnimationFrame(() => this.paint());
  }

  #tellFirst() {
    this.#isFirstPainted = true;
    requestAnimationFrame((now) => {
      // The frame that held the token is on the screen when the next one begins.
      const ms = Math.max(0, now - this.#startedAt);
      this.element.dataset.firstTokenMs = ms.toFixed(1);
      this.#figure("first").textContent = seconds(ms);
    });
  }

  #paintText() {
    const box = this.#find(".text");
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
    const fragment = document.createDocumentFragment();
    for (const { text, token } of this.#arrived) {
      const span = document.createElement("span");
      span.textContent = text;
      span.className = token ? `token ${token.origin}` : "token";
      if (token) span.title = token.title;
      fragment.append(span);
    }
    this.#arrived = [];
    box.append(fragment);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  #paintFigures() {
    const { tally } = this;
    const last = tally.rounds.at(-1);
    this.#figure("tokens").textContent = tally.numTokens;
    this.#figure("rate").textContent = rounded(tally.tokensPerSecond);
    for (const origin of ORIGINS) {
      const count = this.element.querySelector(`[data-origin=${origin}] b`);
      if (count) count.textContent = tally.origins[origin];
    }
    if (!last || !this.#figure("gamma")) return;
    this.#figure("gamma").textContent = last.drafted;
    this.#figure("gamma").title = last.reason;
    this.#figure("yield").textContent = rounded(tally.tokensPerRound);
    this.#figure("drafter").textContent = [...tally.drafters].join(", ") || "nobody";
  }

  #paintPositions() {
    const { drafted, accepted } = this.tally;
    if (!drafted.length) return;
    const list = this.#find(".positions");
    list.querySelector(".none")?.remove();
    // Drafts of a tree have a position each, though several stand at one depth: all past the deepest accepted one share
    // a row.
    const depth = accepted.findLastIndex((count) => count > 0) + 1;
    const numRows = Math.min(drafted.length, depth + 1);
    while (list.children.length < numRows) list.append(positionRow());
    [...list.children].forEach((row, index) => {
      const count = index < depth ? drafted[index] : drafted.slice(depth).reduce((sum, more) => sum + more, 0);
      const share = accepted[index] / count;
      const isShared = index === depth && drafted.length > numRows;
      row.querySelector(".position").textContent = isShared ? `${numRows}–${drafted.length}` : index + 1;
      row.title = isShared ? "In a tree several drafts stand at one depth." : "";
      row.querySelector(".fill").style.width = `${100 * share}%`;
      row.querySelector(".share").textContent = `${Math.round(100 * share)}%`;
      row.querySelector(".of").textContent = `${accepted[index]} of ${count}`;
    });
  }

  #paintRounds() {
    const { rounds } = this.tally;
    const chart = this.#find(".rounds");
    for (const round of rounds.slice(Math.max(this.#numRoundsPainted, rounds.length - MAX_ROUNDS))) {
      chart.append(roundColumn(round));
    }
    this.#numRoundsPainted = rounds.length;
    while (chart.children.length > MAX_ROUNDS) chart.firstElementChild.remove();
    const latest = rounds.slice(-MAX_ROUNDS);
    const highest = Math.max(1, ...latest.map(({ drafted }) => drafted));
    chart.style.setProperty("--highest", highest);
    chart.setAttribute("aria-label", `Drafts of the last ${latest.length} rounds, at most ${highest}`);
  }

  #find(selector) {
    return this.element.querySelector(selector);
  }

  #figure(name) {
    return this.#find(`[data-figure=${name}]`);
  }
}

export function seconds(ms) {
  return `${(ms / 1000).toFixed(2)} s`;
}

function rounded(value) {
  return value === null ? "–" : value.toFixed(value < 10 ? 2 : 1);
}

function positionRow() {
  const row = document.createElement("li");
  for (const name of ["position", "bar", "share", "of"]) row.append(part(name));
  row.querySelector(".bar").append(part("fill"));
  return row;
}

function roundColumn({ drafted, accepted, cause }) {
  const column = part("round");
  column.style.setProperty("--drafted", drafted);
  column.style.setProperty("--accepted-share", drafted ? accepted / drafted : 0);
  column.title = `γ ${drafted}, ${accepted} accepted${cause ? `, ${cause}` : ""}`;
  column.append(part("fill"));
  return column;
}

function part(name) {
  const span = document.createElement("span");
  span.className = name;
  return span;
}
