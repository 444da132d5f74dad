"""The served inspector: it answers this machine's browser, and refuses everybody else."""

import http.client
import json
import socket
import struct
import threading

import pytest
from tinymodels import model_of

import headwater
from headwater.analyze.inspector.serve import InspectorServer
from headwater.errors import UserError
from headwater.train.data.tokenizer import ByteTokenizer

PROMPT = "hello you"


@pytest.fixture(scope="module")
def server():
    model = model_of("attnres-full", scatter=True, layers=2, vocab_size=257)
    tokenizer = ByteTokenizer()

    def look(prompt):
        tokens = tokenizer.encode(prompt).tolist()
        return [headwater.inspect(model, tokens, tokenizer=tokenizer, name="mine")]

    with InspectorServer(look, PROMPT) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server, path="", method="GET", body=None, **headers):
    """Status, body and headers of an answer; `path` is below the token unless it begins with a slash."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    path = path if path.startswith("/") else f"/{server.token}/{path}"
    connection.request(method, path, body, sent)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def post(server, body=None, **headers):
    body = json.dumps({"prompt": "abc"}) if body is None else body
    return ask(server, "inspect", "POST", body, **headers)


def test_it_listens_to_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32
    status, page, headers = ask(server)
    assert status == 200
    assert "<title>Inside mine" in page
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


def test_others_are_refused(server):
    port = server.server_port
    for headers in ({}, {"Origin": f"http://127.0.0.1:{port}"}):
        assert post(server, **headers)[0] == 200
    for name, value in (
        ("Host", "evil.example"),
        ("Host", f"evil.example:{port}"),
        ("Host", f"127.0.0.1:{port + 1}"),
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Origin", f"https://127.0.0.1:{port}"),
        ("Sec_Fetch_Site", "cross-site"),
    ):
        for status, answer, _ in (post(server, **{name: value}), ask(server, **{name: value})):
            assert (status, json.loads(answer)) == (403, {"error": "refused"}), value


def test_without_its_token_nothing_answers(server):
    for path in ("/", "/wrong/", f"/{server.token[:-1]}/", "../", "/inspect", "other"):
        for method in ("GET", "POST"):
            status, answer, _ = ask(server, path, method, "{}" if method == "POST" else None)
            assert (status, json.loads(answer)) == (404, {"error": "not found"})
    assert ask(server, "inspect")[0] == 404  # which is asked by POST alone
    assert ask(server, "", "PUT")[0] == 501


BAD_REQUESTS = {
    "short": (json.dumps({"prompt": "a"}), "two tokens at least"),
    "long": (json.dumps({"prompt": "a" * 40}), "context of 32"),
    "number": (json.dumps({"prompt": 3}), "JSON with a prompt"),
    "list": ("[]", "JSON with a prompt"),
    "cut": ("{", "JSON with a prompt"),
    "nested": ("[" * 50_000, "JSON with a prompt"),
    "half an emoji": (json.dumps({"prompt": "a \ud83d"}), "JSON with a prompt"),
    "too many bytes": ("x" * 3_000_000, "100000 bytes"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_request_that_does_not_fit_is_answered_with_the_reason(server, name, capfd):
    body, words = BAD_REQUESTS[name]
    status, answer, _ = post(server, body)
    assert (status, capfd.readouterr().err) == (400, "")
    assert words in json.loads(answer)["error"]


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "many", ""])
def test_a_length_that_is_no_number_is_refused(server, length, capfd):
    status, answer, _ = post(server, "{}", Content_Length=length)
    assert (status, capfd.readouterr().err) == (400, "")
    assert "100000 bytes" in json.loads(answer)["error"]


def test_a_port_that_is_taken_is_named(server):
    with pytest.raises(UserError, match=f"port {server.server_port}"):
        InspectorServer(server.look, PROMPT, server.server_port)


def test_a_page_that_is_closed_while_the_model_runs_is_no_error(server, monkeypatch, capfd):
    request_arrived, client_left, ended = threading.Event(), threading.Event(), threading.Event()
    look, shutdown = server.look, server.shutdown_request

    def slow(prompt):
        request_arrived.set()
        client_left.wait(30)
        return look(prompt)

    def shut(request):
        shutdown(request)
        ended.set()

    monkeypatch.setattr(server, "look", slow)
    monkeypatch.setattr(server, "shutdown_request", shut)
    body = json.dumps({"prompt": PROMPT})
    address = f"127.0.0.1:{server.server_port}"
    with socket.create_connection(("127.0.0.1", server.server_port)) as client:
        head = f"POST /{server.token}/inspect HTTP/1.1\r\nHost: {address}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert request_arrived.wait(30)
        # Closing resets
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client_left.set()
    assert ended.wait(30)
    assert capfd.readouterr().err == ""


@pytest.mark.browser
def test_the_page_asks_its_model_and_nobody_else(server, visit, browser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = visit(server.address)
    assert page.locator("#words").input_value() == PROMPT
    page.locator("#words").fill("other words")
    page.locator("#prompt button").click()
    page.locator("#asked", has_text="11 tokens").wait_for()
    assert page.locator("#tokens button").count() == 12
    page.locator("#words").fill("by a key")
    page.locator("#words").press("Control+Enter")
    page.locator("#asked", has_text="8 tokens").wait_for()
    page.locator('#tokens button[data-token="3"]').click()
    assert "After token 3" in page.locator("#summary").inner_text()
    assert list(tmp_path.iterdir()) == []

    # What is wrong with a prompt is said in the page; the browser logs the status, too.
    page = browser.new_page()
    page.goto(server.address)
    page.locator("#words").fill("a" * 40)
    page.locator("#prompt button").click()
    page.locator("#asked.wrong", has_text="context of 32").wait_for()
    assert page.locator("#prompt button").is_enabled()
    page.close()
