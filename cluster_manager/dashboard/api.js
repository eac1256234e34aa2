// The manager's REST interface with the user's token, which lives in a variable of this module and nowhere else.

let token = "",
  session = null,
  ahead = null; // by so many ms is the manager's clock ahead of the browser's, by its last answer

/** How long an answer may take, and how long the stream may be silent, which has a sign of life every 15 s. */
export const limits = { answer_ms: 30_000, silence_ms: 40_000 };

/** The manager refuses the token. */
export class Refused extends Error {}

/** Whether an error says that no answer came: a dead network takes requests and is silent. */
export const unanswered = (error) => error instanceof TypeError || error.name === "TimeoutError";

/** An RFC 9457 problem: `status`, `code`, and `errors` with the fields that are at fault. */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the manager answers ${status}`);
    Object.assign(this, { status, code: body.code || "", title: body.title || "", errors: body.errors || [] });
    if (!this.errors.length && body.field) this.errors = [{ field: body.field, detail: this.message }];
  }
}

export function enter(given) {
  // As bytes of UTF-8, which the manager reads: a header takes no character beyond Latin-1.
  token = String.fromCharCode(...new TextEncoder().encode(given));
  session = new AbortController();
  return session;
}

export function leave() {
  if (session) session.abort();
  session = null;
  token = "";
}

export const inside = (mine) => mine === session && session !== null;

/** An id of a request, which makes it harmless when it is sent again. */
export function requestId() {
  return `page-${[...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

async function send(method, path, { body, version, limit } = {}) {
  if (!session) throw new DOMException("the token was forgotten", "AbortError");
  const { signal } = session;
  const headers = { Authorization: `Bearer ${token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (version) headers["If-Match"] = `"${version}"`;
  const answer = await fetch(path, {
    method,
    headers,
    signal: AbortSignal.any([signal, limit || AbortSignal.timeout(limits.answer_ms)]),
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const date = Date.parse(answer.headers.get("Date"));
  if (date) ahead = date - Date.now();
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({ title: answer.statusText }));
  // Several requests may be refused at once: the first one ends the session, and has said why.
  signal.throwIfAborted();
  if (answer.status === 401) throw new Refused(said.detail || said.title);
  throw new Problem(answer.status, said);
}

/** The answer to a GET; null where there is no such thing and that may be. */
export async function ask(path, mayMiss = false) {
  try {
    return await (await send("GET", path)).json();
  } catch (error) {
    if (mayMiss && error.status === 404) return null;
    throw error;
  }
}

/** Change something, of a VM only that version. Returns the answer, and where to look at what has begun. */
export async function change(method, path, { body, version }) {
  const answer = await send(method, path, { body, version });
  return { status: answer.status, body: await answer.json(), where: answer.headers.get("Location") };
}

/** Now by the manager's clock, in seconds: a browser's may be hours off. */
export async function now() {
  if (ahead === null) await ask("/v1/whoami");
  return Math.floor((Date.now() + ahead) / 1000);
}

/** Call `take` with every event behind `since`, until the stream ends. */
export async function follow(since, take, opened) {
  const silent = new AbortController(),
    end = () => silent.abort(new DOMException("the stream of events is silent", "TimeoutError"));
  let timer = setTimeout(end, limits.silence_ms);
  try {
    const answer = await send("GET", `/v1/events/stream?since_id=${since}`, { limit: silent.signal });
    opened();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(end, limits.silence_ms);
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const data = block
          .split("\n")
          .filter((line) => line.startsWith("data: "))
          .map((line) => line.slice(6));
        if (data.length) take(JSON.parse(data.join("\n")));
      }
    }
  } finally {
    clearTimeout(timer);
  }
}
