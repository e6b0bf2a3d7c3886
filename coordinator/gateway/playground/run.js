// One request and its answer, from the click to the last token.

import { seconds } from "./pane.js";
import { stream } from "./stream.js";

export class Run {
  end = null;
  error = null;
  finish = null;
  acceptance = null;
  requestId = null;
  ms = 0;

  constructor(name, body) {
    const isPlain = body.num_speculative_tokens === 0;
    Object.assign(this, { name: isPlain ? "Plain" : name, body, isPlain });
  }

  get tally() {
    return this.pane.tally;
  }

  get text() {
    return this.pane.text;
  }

  /** Never rejects: `end` and `error` say what became of it. The first failure of any ends the others. */
  async go(path, token, control, startedAt) {
    this.pane.begin(startedAt);
    try {
      for await (const { value, raw } of stream(path, this.body, token, control.signal)) this.#take(value, raw);
      this.end = "done";
    } catch (error) {
      this.end = error.name === "AbortError" ? "stopped" : "failed";
      if (this.end === "failed") this.error = error;
      control.abort();
    }
    this.ms = performance.now() - startedAt;
    this.pane.setState(this.end, this.#note());
    this.pane.paint();
  }

  #take(value, raw) {
    if (value.outrider) {
      this.acceptance = value.outrider.acceptance;
      this.requestId = value.outrider.request_id;
      this.seed = /"seed":\s*(\d+)/.exec(raw)?.[1]; // may be above 2 ** 53
    }
    this.usage = value.usage ?? this.usage;
    if (value.metrics) {
      this.metrics = value.metrics;
      this.tally.measured(value.metrics.generation_time_ms);
    }
    for (const choice of value.choices) {
      const text = choice.delta?.content ?? choice.text ?? "";
      const steps = choice.steps ?? [];
      if (text || steps.length) this.pane.add(text, steps, performance.now());
      this.finish = choice.finish_reason ?? this.finish;
    }
  }

  #note() {
    const parts = [];
    const finish = this.finish === "length" ? "max_tokens" : this.finish;
    if (this.end === "done") parts.push(`${seconds(this.ms)} in all, ended by ${finish}`);
    if (this.usage) parts.push(`${this.usage.prompt_tokens} prompt tokens, ${this.usage.completion_tokens} new ones`);
    const first = this.metrics?.time_to_first_token_ms;
    if (first) parts.push(`first token within the service after ${seconds(first)}`);
    if (this.acceptance) parts.push(`rule ${this.acceptance}`);
    if (this.seed) parts.push(`seed ${this.seed}`);
    return parts.join(" · ");
  }

  summary() {
    const { numTokens, tokensPerSecond } = this.tally;
    const rate = tokensPerSecond === null ? "" : `, ${tokensPerSecond.toFixed(1)} tokens/s`;
    return `${this.end === "stopped" ? "Stopped" : "Done"}: ${numTokens} tokens${rate}.`;
  }
}
