// Which token wrote which piece of the text. Text lags behind tokens: part of a code point, and what may yet become a
// stop string, is held back.

const encoder = new TextEncoder();
const decoder = new TextDecoder();

export class Pieces {
  #waiting = []; // tokens whose bytes are not in the text yet: {token, rest}

  /** Tokens in their order; each has `bytes`. */
  push(tokens) {
    for (const token of tokens) this.#waiting.push({ token, rest: Uint8Array.from(token.bytes) });
  }

  /** New text, cut at the tokens that wrote it: [{text, token}]. A code point goes with its first byte. */
  take(text) {
    const bytes = encoder.encode(text);
    const pieces = [];
    let at = 0;
    while (at < bytes.length) {
      const found = this.#waiting.findIndex(({ rest }) => rest.length > 0 && agree(rest, bytes, at));
      if (found < 0) {
        // Written otherwise than its tokens would be one by one: the latest one stands for all.
        const last = this.#waiting.at(-1)?.token ?? null;
        this.#waiting = [];
        pieces.push({ text: decoder.decode(bytes.subarray(at)), token: last });
        break;
      }
      const { token, rest } = this.#waiting[found];
      const length = Math.min(rest.length, bytes.length - at);
      const end = boundary(bytes, at + length);
      const start = boundary(bytes, at);
      if (end > start) pieces.push({ text: decoder.decode(bytes.subarray(start, end)), token });
      at += length;
      if (length < rest.length) this.#waiting[found].rest = rest.subarray(length);
      // Those before it wrote nothing: special tokens are left out of texts.
      this.#waiting.splice(0, length < rest.length ? found : found + 1);
    }
    return pieces;
  }
}

function agree(rest, bytes, at) {
  const length = Math.min(rest.length, bytes.length - at);
  for (let i = 0; i < length; i++) if (rest[i] !== bytes[at + i]) return false;
  return true;
}

/** The first place from `at` on where a code point begins. */
function boundary(bytes, at) {
  while (at < bytes.length && (bytes[at] & 0xc0) === 0x80) at++;
  return at;
}
