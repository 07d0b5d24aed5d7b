// Asks the operator's port, with the operator's key where one is wanted.

const STORED = "headrace-operator-key";

export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // The body is no JSON: the status says enough.
  }
  return new Refused(response.status, error.message ?? `the server answers ${response.status}`, error.code);
}

export const ask = (path, body) => askPort(`console/api/${path}`, body);

// Any path of the operator's port. With a body, even an empty one, it is a POST.
export async function askPort(path, body) {
  const key = sessionStorage.getItem(STORED);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(path, { headers, ...sent });
  if (response.status === 401) {
    await login(key);
    return askPort(path, body);
  }
  if (!response.ok) throw await refusal(response);
  return response.json();
}

let opened = null;

function login(refused) {
  const dialog = document.getElementById("login");
  const field = document.getElementById("operator-key");
  opened ??= new Promise((resolve) => {
    field.value = "";
    document.getElementById("login-problem").textContent = refused ? "This is not the operator's key." : "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(STORED, field.value.trim());
      opened = null;
      resolve();
    }, { once: true });
  });
  return opened;
}
