// Runs the features of one client and prints a line of JSON for each: its name, and why it does not work, if so.

export const URL = process.env.HEADRACE_URL;
export const KEY = process.env.HEADRACE_KEY;
export const MODEL = process.env.HEADRACE_MODEL;
// A second system, whose model thinks.
export const THINKING_URL = process.env.HEADRACE_THINKING_URL;
export const THINKING_KEY = process.env.HEADRACE_THINKING_KEY;
export const THINKING_MODEL = process.env.HEADRACE_THINKING_MODEL;
// A third one, whose model calls the tool `nobody`, whatever it is asked.
export const CALLING_URL = process.env.HEADRACE_CALLING_URL;
export const CALLING_KEY = process.env.HEADRACE_CALLING_KEY;
export const CALLING_MODEL = process.env.HEADRACE_CALLING_MODEL;
// A fourth one, whose model reads images.
export const SEEING_URL = process.env.HEADRACE_SEEING_URL;
export const SEEING_KEY = process.env.HEADRACE_SEEING_KEY;
export const SEEING_MODEL = process.env.HEADRACE_SEEING_MODEL;
// A PNG of 32 times 24 red pixels, which that model reads as 12 tokens; with the letters of `Look` and the template's.
export const PICTURE = "iVBORw0KGgoAAAANSUhEUgAAACAAAAAYCAIAAAAUMWhjAAAAJElEQVR42mP8z0BbwMQwasGoBaMWjFowasGoBaMWjFowJCwAAPHIAS+0z0eXAAAAAElFTkSuQmCC";
export const NUM_SEEN = 12 + 5;
export const NUM_TURNS = 20;

export const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 8 },
    age: { type: "integer", minimum: 0, maximum: 120 },
  },
  required: ["name", "age"],
  additionalProperties: false,
};

export function check(condition, what) {
  if (!condition) throw new Error(what === undefined ? "it is not so" : JSON.stringify(what));
}

export function checkPerson(value) {
  check(typeof value.name === "string" && value.age >= 0 && value.age <= 120, value);
}

export async function run(cells) {
  for (const [feature, attempt] of Object.entries(cells)) {
    let why = "";
    try {
      await attempt();
    } catch (error) {
      console.error(error);
      why = `${error.name}: ${error.message}`.slice(0, 500);
    }
    console.log(JSON.stringify({ feature, why }));
  }
}
