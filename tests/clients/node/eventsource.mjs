// `EventSource` as browsers have it, with headers: it reads a stream that another connection has begun and left.

import { EventSource } from "eventsource";
import { KEY, MODEL, URL, check, run } from "./cells.mjs";

const authorization = `Bearer ${KEY}`;

await run({
  "resumed chat streams": async () => {
    const messages = [{ role: "user", content: "Somebody, please." }];
    const ask = { model: MODEL, messages, max_tokens: 40, stream: true, stream_options: { resumable: true } };
    const leaving = new AbortController();
    const begun = await fetch(`${URL}/v1/chat/completions`, {
      method: "POST", body: JSON.stringify(ask), signal: leaving.signal,
      headers: { authorization, "content-type": "application/json" },
    });
    await begun.body.getReader().read();
    leaving.abort();
    const source = new EventSource(`${URL}/v1/streams/${begun.headers.get("x-request-id")}`, {
      fetch: (url, options) => fetch(url, { ...options, headers: { ...options.headers, authorization } }),
    });
    const events = [];
    source.onmessage = (event) => events.push(event);
    // It connects again at the end, with the last id, and gets a 204.
    const status = await new Promise((resolve) => {
      source.onerror = (error) => { if (source.readyState === EventSource.CLOSED) resolve(error.code); };
    });
    check(status === 204, status);
    check(events.every((event, index) => event.lastEventId === `${index}`), events.map((event) => event.lastEventId));
    check(events.length > 2 && events.at(-1).data === "[DONE]", events.map((event) => event.data));
  },
});
