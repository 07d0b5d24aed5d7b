"""The console as a person uses it: in headless Chromium, by what is on the page and by clicks and keys."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from ops.stack.config import DEMO_MODEL
from tests.integration.browser import CHROMIUM, Page, browsing
from tests.integration.hosted import load_on, order, wait_for_state
from tests.integration.system import System, running_system
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: .ci/chromium does it")
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("console")
    with running_system(
        directory, "--simulate", "5", "--log-prompts", "--models-dir", str(DEMO_MODEL.parent)
    ) as system:
        yield system


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(system: System, browser: Page) -> Page:
    """A tab at the console, logged in as the operator."""
    browser.size(1280, 900)
    browser.open("about:blank")
    browser.open(console(system))
    browser.wait("Boolean(document.querySelector('nav')) && location.protocol === 'http:'")
    key = json.dumps(system.info["operator_key"])
    browser.run(f"sessionStorage.setItem('headrace-operator-key', {key}); localStorage.clear(); location.hash = ''")
    # A dialog that is open by now stores what is in its field when it closes.
    browser.run(f"""(() => {{
        document.getElementById('operator-key').value = {key};
        if (document.getElementById('login').open) document.getElementById('login').close();
    }})()""")
    browser.problems.clear()
    browser.open("about:blank")
    browser.open(console(system))
    browser.wait_text("Workers")
    return browser


def console(system: System) -> str:
    return str(system.info["metrics_url"]).removesuffix("/metrics") + "/console"


def ask(system: System, request_id: str, prompt: str = "hello", **fields: object) -> httpx2.Response:
    body = {
        "model": system.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 5,
        "seed": 1,
    } | fields
    headers = system.headers() | {"x-request-id": request_id}
    return httpx2.post(f"{system.url}/v1/chat/completions", headers=headers, json=body, timeout=60)


def test_address_that_is_no_page_is_told(page: Page) -> None:
    page.run("location.hash = '#nope'")
    page.wait_text("There is no page #nope.")
    page.run("location.hash = '#request/%'")
    page.wait("document.getElementById('request-id')?.value === '%'")
    page.run("document.querySelector('.skip').click()")
    assert page.run("document.activeElement.id + location.hash") == "view#request/%"


def test_message_stays_until_there_is_a_key(page: Page) -> None:
    page.run("sessionStorage.removeItem('headrace-api-key'); location.hash = '#playground'")
    page.wait("Boolean(document.getElementById('message'))")
    page.click("#message")
    page.type("hello")
    page.run("document.querySelector('form button[type=submit]').click()")
    page.wait_text("An API key is needed here")
    assert page.run("document.getElementById('message').value") == "hello"


def test_key_is_asked_for_once_and_opens_the_page(system: System, browser: Page) -> None:
    browser.open(console(system))
    browser.wait("Boolean(document.querySelector('nav'))")
    browser.run("sessionStorage.clear()")
    browser.open("about:blank")
    browser.open(console(system))
    browser.wait("Boolean(document.getElementById('login')?.open)")
    browser.click("#operator-key")
    browser.type("wrong")
    browser.press("Enter")
    browser.wait_text("This is not the operator's key.")
    browser.click("#operator-key")
    browser.type(system.info["operator_key"])
    browser.press("Enter")
    browser.wait_text("headrace-demo")
    assert system.info["operator_key"] not in browser.run("document.documentElement.outerHTML")


def test_slow_request_is_found_and_explained_in_two_clicks(system: System, page: Page) -> None:
    assert ask(system, "the-slow-one", max_tokens=200, ignore_eos=True).status_code == 200
    assert ask(system, "a-fast-one").status_code == 200
    page.press("2")
    page.click("button", "slowest")
    page.click("tbody tr:first-child a", "the-slow-one")
    page.wait_text("What happened")
    shown = page.text(".life")
    assert "attempt 0 worker-" in shown
    assert "prefilled" in shown
    assert re.search(r"device time\s+[\d,.]+ ms", shown)
    assert "curl $HEADRACE_URL/v1/chat/completions" in page.text(".curl")
    narrow = "[...document.querySelectorAll('.track .bar')].filter(each => each.getBoundingClientRect().width < 3.9)"
    assert page.run(f"{narrow}.length") == 0
    page.run("document.querySelector('.bar.prefill').focus()")
    page.wait_text("prefill part 1", ".detail")
    assert page.problems == []


def test_markup_in_prompts_shows_as_text(system: System, page: Page) -> None:
    assert ask(system, "evil-one", EVIL).status_code == 200
    page.press("2")
    page.click("a", "evil-one")
    page.wait_text(EVIL, ".prompt")
    assert page.run("document.title") == "Headrace console"
    assert page.run("document.querySelectorAll('main script, main img, main b').length") == 0
    assert page.problems == []


def test_refused_request_shows_why(system: System, page: Page) -> None:
    assert ask(system, "refused-one", "x " * 100_000).status_code == 400
    page.press("2")
    page.click("button", "not answered")
    page.click("a", "refused-one")
    page.wait_text("context_length_exceeded", ".life")


def test_playground_streams_with_probabilities_and_links_to_its_timeline(system: System, page: Page) -> None:
    page.press("3")
    page.click("#api-key")
    page.type(system.info["api_key"])
    page.press("Tab")
    page.wait("document.querySelectorAll('#model option').length === 1")
    page.click("#message")
    page.type(EVIL)
    page.press("Enter", modifiers=2)
    page.wait("document.querySelectorAll('.token[title*=\"%\"]').length > 20")
    page.wait_text("tokens/s", "#speed")
    page.wait("!document.querySelector('button[type=submit]').disabled")
    assert page.text(".turn.user") == EVIL
    assert '"finish_reason"' in page.run("document.getElementById('raw').textContent")
    page.click("#speed a", "timeline")
    page.wait_text("What happened")
    assert page.run("document.title") == "Headrace console"
    assert page.problems == []


def test_key_is_made_used_and_revoked(system: System, page: Page) -> None:
    page.press("4")
    page.click("#key-tenant")
    page.type("acme")
    page.click("#key-name")
    page.type("laptop")
    page.click("button", "Make a key")
    page.wait("Boolean(document.getElementById('made-key'))")
    key = page.text("#made-key")
    page.wait_text("laptop")
    headers = {"Authorization": f"Bearer {key}"}
    wait_for(lambda: httpx2.get(f"{system.url}/v1/models", headers=headers).status_code == 200)
    page.click("button", "Make a key")  # A tenant is required: the browser says so, and nothing is made.
    page.click("#key-tenant")
    page.type("acme")
    page.click("#key-name")
    page.type("laptop")
    page.click("button", "Make a key")
    page.wait_text("the name 'laptop' means")
    page.run("window.confirm = () => true")
    page.click("button", "Revoke")
    page.wait_text("revoked ")
    wait_for(lambda: httpx2.get(f"{system.url}/v1/models", headers=headers).status_code == 401)
    lines = (system.ready_file.parent / "state" / "audit.jsonl").read_text().splitlines()
    done = [
        (entry["action"], entry["outcome"]) for entry in map(json.loads, lines) if entry["action"].startswith("keys.")
    ]
    assert done == [("keys.create", "done"), ("keys.create", "failed"), ("keys.revoke", "done")]
    assert key not in "".join(lines)


@pytest.fixture
def canary(system: System) -> Iterator[str]:
    """The model of a canary of the alias `chat`, which has half of it; both are served by simulated engines."""
    model = "the-other-model"
    order(system, "load", model, path=DEMO_MODEL.name)
    wait_for_state(system, model, "awake", 120)
    assert post(system, "aliases", name="chat", model=system.model).status_code == 200
    assert post(system, "canaries", alias="chat", model=model, percent=50).status_code == 200
    yield model
    assert post(system, "aliases/remove", name="chat").status_code == 200
    order(system, "unload", model)
    # Other tests count the models that there are.
    wait_for(lambda: [each.id for each in system.client().models.list()] == ["headrace-demo"])


def post(system: System, path: str, **body: object) -> httpx2.Response:
    return system.operator(f"/v1/{path}", body)


def test_canary_is_compared_and_rolled_back_by_a_person_while_requests_go_on(
    system: System, page: Page, canary: str
) -> None:
    page.press("6")
    page.wait_text("Canary of chat: 50% of conversations")
    page.wait_text("judged after 100 more requests", ".canary")

    def ask_one(number: int) -> None:
        assert ask(system, f"canary-{number}", f"prompt {number}", model="chat").json()["model"] == "chat"

    with load_on(ask_one, 2) as answered:
        requests = "[...document.querySelectorAll('.canary tbody tr')].map((row) => Number(row.cells[2].textContent))"
        page.wait(f"{requests}.every((count) => count > 3)")
        shown = page.text(".canary tbody")
        assert shown.index("stable") < shown.index(system.model) < shown.index("canary") < shown.index(canary)
        page.run("window.confirm = (text) => { window.confirmed = text; return true; }")
        page.click(".canary button", "Roll back")
        page.wait_text("Canary of chat: rolled back")
        page.wait_text("by an operator", ".canary")
        count = len(answered)
        wait_for(lambda: len(answered) > count + 10)
    assert page.run("window.confirmed").startswith("Roll back the canary ")
    assert f"of chat? All its requests go to {system.model} then." in page.run("window.confirmed")
    assert page.run("document.querySelectorAll('.canary button').length") == 0
    assert page.problems == []
    lines = (system.ready_file.parent / "state" / "audit.jsonl").read_text().splitlines()
    (line,) = [entry for entry in map(json.loads, lines) if entry["action"] == "canary.rollback"]
    assert (line["outcome"], line["what"]["alias"]) == ("done", "chat")


def test_request_is_asked_again_with_tools_and_an_image(system: System, page: Page) -> None:
    chosen = {"temperature": 0.25, "top_p": 0.5, "stop": ["zzz"]}
    assert ask(system, "again", "tell me of mills", **chosen).status_code == 200
    page.run(f"sessionStorage.setItem('headrace-api-key', {json.dumps(system.info['api_key'])})")
    page.run("location.hash = 'request/again'")
    page.click("#replay")
    page.wait("document.querySelector('#model')?.value.length > 0")
    assert page.run("document.getElementById('message').value") == "tell me of mills"
    page.run("document.getElementById('tools').value = '[{'")
    page.click("button", "Send")
    page.wait_text("Tools: ", "#notice")
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
    page.run(f"document.getElementById('tools').value = {json.dumps(json.dumps([tool]))}")
    page.click("button", "Send")
    page.wait("document.getElementById('raw').textContent.includes('x-request-id')")
    sent = json.loads(page.run("document.getElementById('raw').textContent"))["request"]
    assert sent["tools"] == [tool]
    assert {name: sent[name] for name in (*chosen, "seed", "max_tokens")} == chosen | {"seed": 1, "max_tokens": 5}
    assert sent["messages"][0] == {"role": "user", "content": "tell me of mills"}
    page.run(ATTACH)
    page.click("#message")
    page.type("what is this?")
    page.click("button", "Send")
    page.wait_text("image", "#notice")  # The model reads text alone, and the gateway says so.
    assert page.run("document.getElementById('message').value") == "what is this?"
    # An image alone is sent too.
    page.run("document.getElementById('notice').textContent = ''")
    page.run("document.getElementById('message').value = ''")
    assert page.run("document.getElementById('images').files[0].name") == "dot.png"
    page.click("button", "Send")
    page.wait_text("image", "#notice")


def test_completion_is_asked_again_as_one_and_what_is_not_kept_is_told(system: System, page: Page) -> None:
    prompt = "x " * 300 + "the end"
    chosen = {"max_tokens": 5, "seed": 3, "stop": ["zzz"]}
    body = {"model": system.model, "prompt": prompt, **chosen}
    headers = system.headers() | {"x-request-id": "completed"}
    assert httpx2.post(f"{system.url}/v1/completions", headers=headers, json=body, timeout=60).status_code == 200
    page.run(f"sessionStorage.setItem('headrace-api-key', {json.dumps(system.info['api_key'])})")
    page.run("location.hash = 'request/completed'")
    page.wait_text("of prompt not everything is kept", "#not-kept")
    page.click("#replay")
    page.wait("document.querySelector('#model')?.value.length > 0")
    page.click("button", "Send")
    page.wait("document.getElementById('raw').textContent.includes('x-request-id')")
    sent = json.loads(page.run("document.getElementById('raw').textContent"))["request"]
    assert {name: sent[name] for name in ("prompt", *chosen)} == {"prompt": prompt[-500:], **chosen}
    assert page.text(".turn.assistant")
    assert page.problems == []


ATTACH = """(() => {
  const files = new DataTransfer();
  files.items.add(new File([new Uint8Array([1, 2, 3])], 'dot.png', { type: 'image/png' }));
  document.getElementById('images').files = files.files;
})()"""


def test_models_of_hosts_are_shown_with_their_state(page: Page) -> None:
    page.wait_text("Models of hosts")
    page.wait("""[...document.querySelectorAll('section')].some((each) =>
        each.querySelector('h2').textContent === 'Models of hosts'
        && each.querySelector('tbody').textContent.startsWith('headrace-demo')
        && each.querySelector('tbody').textContent.includes('awake'))""")
    assert page.problems == []


def test_views_of_tenants_and_dead_letters_are_reached_by_keys(page: Page) -> None:
    page.press("4")
    page.wait_text("Limits of tenants")
    page.wait_text("headrace-demo")
    page.press("5")
    page.wait_text("0 in all")
    page.press("6")
    page.wait_text("Aliases and canaries")
    page.press("1")
    page.wait_text("Gateways")
    assert page.problems == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_and_are_readable_in_both_themes(system: System, page: Page, theme: str, width: int) -> None:
    assert ask(system, "seen").status_code == 200
    page.size(width, 800)
    page.run(f"document.documentElement.dataset.theme = '{theme}'")
    for place in ("now", "request/seen", "playground", "tenants", "dead", "aliases"):
        page.run(f"location.hash = '{place}'")
        page.wait("document.querySelectorAll('main section').length > 0")
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), place
        assert page.run(CONTRAST) == [], place


CONTRAST = """(() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (!color.startsWith('rgba(') ) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const low = [];
  for (const each of document.querySelectorAll('h1, h2, th, td, a, button:not(.bar), p, label, .label, span, b')) {
    if (!each.innerText?.trim() || !each.getClientRects().length || each.disabled || each.closest('.skip')) continue;
    const [a, b] = [light(getComputedStyle(each).color), light(back(each))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) low.push(`${each.tagName} ${each.innerText.slice(0, 20)} ${contrast.toFixed(2)}`);
  }
  return low;
})()"""


@pytest.mark.slow
def test_ten_viewers_take_less_than_a_hundredth_of_a_processor(system: System) -> None:
    url, key = f"{console(system)}/api/now", {"Authorization": f"Bearer {system.info['operator_key']}"}

    def cpu_s() -> float:
        return sum(float(each["cpu_s"]) for each in httpx2.get(url, headers=key).json()["gateways"])

    def watch(num_viewers: int) -> float:
        """Look every two seconds, as open pages do, and return the part of a processor that gateways took meanwhile."""
        before, began = cpu_s(), time.monotonic()
        with httpx2.Client(headers=key) as http:
            for _ in range(10):
                for _ in range(num_viewers):
                    assert http.get(url).status_code == 200
                time.sleep(2)
        return (cpu_s() - before) / (time.monotonic() - began)

    idle, watched = watch(0), watch(10)
    sys.stdout.write(f"{idle:.2%} of a processor without viewers, {watched:.2%} with ten\n")
    assert watched - idle < 0.01


def test_policy_forbids_inline_scripts_and_foreign_hosts_and_data_needs_the_key(system: System) -> None:
    page = httpx2.get(console(system))
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    files = {path.name: path.read_text() for path in Path("gateway/console/static").iterdir()}
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", files["index.html"])
    for name, text in files.items():
        assert httpx2.get(f"{console(system)}/{name}").status_code == 200
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    for path in ("now", "requests", "requests/x", "tenants", "dead-letters"):
        assert httpx2.get(f"{console(system)}/api/{path}").status_code == 401
    assert httpx2.get(f"{console(system)}/..%2findex.html").status_code == 404
    tenants = system.operator("/console/api/tenants")
    assert tenants.status_code == 200
    assert "sha256" not in tenants.text
    assert system.operator("/v1/chat/completions", {}).status_code == 401
