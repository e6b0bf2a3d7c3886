// Counts of one text, from the records of its rounds.

const MIN_SPAN_MS = 100;

export const ORIGINS = ["accepted", "correction", "bonus", "plain"];

export class Tally {
  ids = [];
  rounds = []; // {drafted, accepted, cause, reason}
  origins = Object.fromEntries(ORIGINS.map((origin) => [origin, 0]));
  drafted = []; // by position in the round: drafts checked
  accepted = []; // by position: of them, accepted
  drafters = new Set();
  #firstAt = null;
  #numFirst = 0;
  #lastAt = null;
  #measured = null;

  /** A round that came at `now`, in ms. */
  add(step, now) {
    const accepted = step.tokens.filter(({ origin }) => origin === "accepted").length;
    for (const { id, origin } of step.tokens) {
      this.ids.push(id);
      this.origins[origin]++;
    }
    for (let position = 0; position < step.num_draft_tokens; position++) {
      this.drafted[position] = (this.drafted[position] ?? 0) + 1;
      this.accepted[position] = (this.accepted[position] ?? 0) + (position < accepted ? 1 : 0);
    }
    if (step.num_draft_tokens && step.drafter) this.drafters.add(step.drafter);
    const { cause = "", reason = "" } = step;
    this.rounds.push({ drafted: step.num_draft_tokens, accepted, cause, reason });
    if (this.#firstAt === null) {
      this.#firstAt = now;
      this.#numFirst = step.tokens.length;
    }
    this.#lastAt = now;
  }

  get numTokens() {
    return this.ids.length;
  }

  get numDrafted() {
    return this.drafted.reduce((sum, count) => sum + count, 0);
  }

  /** The service's own measure, once it is told: what a slow reader finds waiting comes at no rate of its own. */
  measured(generationMs) {
    if (generationMs > 0) this.#measured = (1000 * (this.numTokens - 1)) / generationMs;
  }

  /** Since the first token, so that the wait for it does not blur it; null while too little has come to tell. */
  get tokensPerSecond() {
    if (this.#measured !== null) return this.#measured;
    const ms = this.#lastAt - this.#firstAt;
    return ms >= MIN_SPAN_MS ? (1000 * (this.numTokens - this.#numFirst)) / ms : null;
  }

  get tokensPerRound() {
    return this.rounds.length ? this.numTokens / this.rounds.length : null;
  }
}
