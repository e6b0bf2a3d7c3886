// Requests to the gateway that serves this page, and the events of a streamed answer.

/** What the server said no with. `param`: the field it is about, or null. */
export class ServerError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter });
  }
}

/** Models that are served. */
export async function models(token) {
  const response = await ask("../v1/models", { headers: headers(token) });
  return (await response.json()).data;
}

/** Objects of a streamed answer, each with the text it was read from: seeds may be larger than a JS number. */
export async function* stream(path, body, token, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { ...headers(token), "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let isDone = false;
  for await (const { name, data } of events(response.body)) {
    if (data === "[DONE]") {
      isDone = true;
      continue;
    }
    const value = JSON.parse(data);
    if (name === "error" || value.error) throw toError(value.error, response);
    yield { value, raw: data };
  }
  if (!isDone) throw new ServerError("The connection ended before the text did.");
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The gateway cannot be reached.");
  }
  if (response.ok) return response;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // not this service's own words: a proxy's, perhaps
  }
  throw toError(told ?? { message: `HTTP ${response.status} ${response.statusText}` }, response);
}

function toError(told, response) {
  const { message, code = null, param = null } = told;
  const retryAfter = response.headers.get("retry-after");
  return new ServerError(message, { status: response.status, code, param, retryAfter });
}

function headers(token) {
  return token ? { authorization: `Bearer ${token}` } : {};
}

/** Server-sent events: {name, data}. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = { name: "message", data: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith("data:")) event.data += line.slice(5).trimStart();
        if (line.startsWith("event:")) event.name = line.slice(6).trim();
      }
      if (event.data) yield event;
    }
  }
}
