// The form, and what happens on Run and Stop.

import { Pane } from "./pane.js";
import { Run } from "./run.js";
import { models } from "./stream.js";
import { Comparison } from "./verdict.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const FIELDS = ["model", ...NUMBERS, "num_speculative_tokens", "drafter", "acceptance", "prompt", "token"];
const PATHS = { chat: "../v1/chat/completions", text: "../v1/completions" };
const PROMPTS = {
  chat: "Explain in a few sentences why the sky is blue.",
  text: "Once upon a time there was a lighthouse keeper who",
  toy: "!!",
};
const SAFE_SEEDS = 2 ** 53;
const isWide = matchMedia("(min-width: 60rem)");

let served = [];
let running = null; // an AbortController

// ---- models

async function loadModels() {
  try {
    served = await models($("token").value);
    clearError();
  } catch (error) {
    showError(error);
    $("about").textContent = "No models are known yet.";
    if (error.status === 401) $("token").focus();
    return;
  }
  const before = $("model").value;
  fill($("model"), served.map(({ id }) => [id, id]));
  if (served.some(({ id }) => id === before)) $("model").value = before;
  showModel();
}

/** What the chosen model offers. */
function showModel() {
  const model = served.find(({ id }) => id === $("model").value);
  if (!model) return;
  const { drafters = [], acceptance_rules = [], max_speculative_tokens = 8, ...told } = model.outrider ?? {};
  const gammas = Array.from({ length: max_speculative_tokens + 1 }, (_, gamma) => [gamma, gamma || "0, plain"]);
  fill($("num_speculative_tokens"), [["", "auto"], ...gammas]);
  fill($("drafter"), [["", "auto"], ...drafters.filter((name) => name !== "auto").map((name) => [name, name])]);
  if (acceptance_rules.length) {
    fill($("acceptance"), [["", "the service's own"], ...acceptance_rules.map((rule) => [rule, rule])]);
  }
  $("kind").value = told.has_chat_template === false ? "text" : "chat";
  showPrompt(told.simulated);
  const draft = told.draft_model ? `, drafts by ${told.draft_model}` : "";
  const toy = told.simulated ? ", a simulated toy" : "";
  const length = model.max_model_len ? `, up to ${model.max_model_len} tokens` : "";
  $("about").textContent = `${model.root ?? model.id}${toy}${draft}${length}`;
}

/** An example, unless the prompt is the reader's own. */
function showPrompt(isSimulated) {
  const isExample = ["", ...Object.values(PROMPTS)].includes($("prompt").value);
  if (isExample) $("prompt").value = PROMPTS[isSimulated ? "toy" : $("kind").value];
}

/** Options as [value, text]; the chosen one stays where it is still there. */
function fill(select, options) {
  const { value } = select;
  select.replaceChildren(...options.map(([option, text]) => new Option(text, option)));
  if (options.some(([option]) => String(option) === value)) select.value = value;
}

// ---- a request

function readRequest() {
  const isChat = $("kind").value === "chat";
  const prompt = $("prompt").value;
  const body = {
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    stream: true,
    stream_options: { include_usage: true },
    report_steps: true,
  };
  if ($("model").value) body.model = $("model").value;
  for (const name of NUMBERS) {
    const field = $(name);
    if (field.validity.badInput) throw refusal(`${name} is not a number.`, name);
    if (field.value !== "") body[name] = Number(field.value);
  }
  if (Math.abs(body.seed) >= SAFE_SEEDS) {
    throw refusal(`seed is too large for this page: give one below ${SAFE_SEEDS}.`, "seed");
  }
  const gamma = $("num_speculative_tokens").value;
  if (gamma !== "") body.num_speculative_tokens = Number(gamma);
  for (const name of ["drafter", "acceptance"]) if ($(name).value) body[name] = $(name).value;
  return { path: PATHS[isChat ? "chat" : "text"], body };
}

function plainOf(body) {
  const { drafter, ...plain } = body;
  return { ...plain, num_speculative_tokens: 0 };
}

function refusal(message, param) {
  return Object.assign(new Error(message), { param });
}

async function run() {
  if (running) return;
  clearError();
  $("verdict").hidden = true;
  let request;
  try {
    request = readRequest();
  } catch (error) {
    showError(error);
    return;
  }
  const isCompared = $("compare").checked;
  if (isCompared && request.body.seed === undefined) request.body.seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const control = (running = new AbortController());
  setRunning(true);
  tell("Running.");

  const runs = [new Run("Speculative", request.body)];
  if (isCompared) runs.push(new Run("Plain", plainOf(request.body)));
  const comparison = isCompared ? new Comparison(...runs, { isGreedy: request.body.temperature === 0 }) : null;
  const showComparison = () => comparison && showVerdict(comparison.tell());
  for (const one of runs) one.pane = new Pane(one.name, { isPlain: one.isPlain, onPaint: showComparison });
  $("panes").replaceChildren(...runs.map(({ pane }) => pane.element));
  $("panes").classList.toggle("two", isCompared);
  if (!isWide.matches) $("result").scrollIntoView({ block: "start" });

  const now = performance.now();
  await Promise.all(runs.map((one) => one.go(request.path, $("token").value, control, now)));
  running = null;
  setRunning(false);
  showComparison();
  const failed = runs.find(({ error }) => error);
  if (failed) showError(failed.error);
  tell(failed ? "Failed." : runs[0].summary());
}

function stop() {
  running?.abort();
}

// ---- what the page says

function tell(text) {
  $("status").textContent = text;
}

function showVerdict({ kind, text }) {
  const box = $("verdict");
  box.dataset.kind = kind;
  // Told aloud once it is final, not with every token.
  box.setAttribute("aria-live", kind === "running" ? "off" : "polite");
  if (box.textContent !== text) box.textContent = text;
  box.hidden = false;
}

function showError(error) {
  const about = [error.status ? `HTTP ${error.status}` : null, error.code, error.param ? `field ${error.param}` : null];
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const told = about.filter(Boolean).join(", ");
  $("error").textContent = `${error.message}${told ? ` (${told})` : ""}${wait}`;
  $("error").hidden = false;
  const name = error.status === 401 ? "token" : error.param === "messages" ? "prompt" : error.param;
  if (FIELDS.includes(name)) {
    $(name).setAttribute("aria-invalid", "true");
    if ($("settings").contains($(name))) $("settings").open = true;
  }
}

function clearError() {
  $("error").hidden = true;
  $("error").textContent = "";
  for (const name of FIELDS) $(name).removeAttribute("aria-invalid");
}

function setRunning(isRunning) {
  // Not `disabled`: whoever pressed a button keeps the focus.
  $("run").setAttribute("aria-disabled", String(isRunning));
  $("stop").setAttribute("aria-disabled", String(!isRunning));
  document.body.classList.toggle("running", isRunning);
}

// ---- events

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("stop").addEventListener("click", stop);
$("model").addEventListener("change", showModel);
$("model").addEventListener("focus", () => served.length || loadModels()); // the service may have come up since
$("kind").addEventListener("change", () => showPrompt(false));
$("token").addEventListener("change", loadModels);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "Escape" && running) {
    event.preventDefault();
    stop();
  }
});

if (!isWide.matches) $("settings").open = false;
$("panes").replaceChildren(new Pane("Speculative", { isPlain: false, onPaint: () => {} }).element);
loadModels();
