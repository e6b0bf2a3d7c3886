// Whether two texts of one seed are equal, and which was there first.

import { seconds } from "./pane.js";

/** A run as it is: `tally`, `text`, `end` ("done", "stopped", "failed" or null), `finish`, `ms`, `acceptance`. */
export class Comparison {
  #agreed = 0;

  constructor(speculative, plain, { isGreedy }) {
    Object.assign(this, { speculative, plain, isGreedy });
  }

  /** {kind, text}; kind: running, equal, different, inconclusive or stopped. */
  tell() {
    const [ids, others] = [this.speculative.tally.ids, this.plain.tally.ids];
    const length = Math.min(ids.length, others.length);
    while (this.#agreed < length && ids[this.#agreed] === others[this.#agreed]) this.#agreed++;
    const differs = this.#agreed < length;
    const isOver = this.speculative.end !== null && this.plain.end !== null;
    if (!isOver) {
      const text = differs ? `Different from token ${this.#agreed + 1} on.` : `Equal so far: ${tokens(this.#agreed)}.`;
      return { kind: "running", text };
    }
    if (differs) return this.#different();
    if (this.speculative.end !== "done" || this.plain.end !== "done") {
      return { kind: "stopped", text: `Not compared to the end. Equal as far as both came: ${tokens(this.#agreed)}.` };
    }
    const isEqual =
      ids.length === others.length &&
      this.speculative.text === this.plain.text &&
      this.speculative.finish === this.plain.finish;
    if (!isEqual) return this.#different();
    if (!this.speculative.tally.numDrafted) {
      const text = `Equal, ${tokens(ids.length)}, but nothing was drafted, so this shows nothing. Choose a γ.`;
      return { kind: "inconclusive", text: `${text} ${this.#race()}` };
    }
    return { kind: "equal", text: `The texts are equal: ${tokens(ids.length)}, each the same. ${this.#race()}` };
  }

  #different() {
    const where = `The texts differ from token ${this.#agreed + 1} on`;
    if (!this.isGreedy && this.speculative.acceptance !== "coupled") {
      const rule = this.speculative.acceptance ?? "this rule";
      const text = `${where}, as they may: under ${rule} both follow the target's law. Choose coupled for one text.`;
      return { kind: "inconclusive", text: `${text} ${this.#race()}` };
    }
    const ids = [this.speculative, this.plain].map(({ requestId }) => requestId).join(" and ");
    const text = `${where}, and should not: rounding of a target without numerics=exact, or a bug. Requests ${ids}.`;
    return { kind: "different", text };
  }

  #race() {
    const [ours, theirs] = [this.speculative.ms, this.plain.ms];
    if (this.speculative.end !== "done" || this.plain.end !== "done") return "";
    const first = ours <= theirs ? "Speculative" : "Plain";
    const [fast, slow] = [Math.min(ours, theirs), Math.max(ours, theirs)];
    const times = `${(slow / fast).toFixed(2)} times as fast`;
    return `${first} finished first: ${seconds(fast)} against ${seconds(slow)}, ${times}, sharing the machine.`;
  }
}

function tokens(count) {
  return count === 1 ? "1 token" : `${count} tokens`;
}
