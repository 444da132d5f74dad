"""The served inspector: it answers this machine's browser, and refuses everybody else."""

import http.client
import json
import socket
import struct
import threading
from functools import partial

import pytest
from tinymodels import model_of

import headwater
from headwater.analyze.inspector.serve import InspectorServer
from headwater.errors import UserError
from headwater.train.data.tokenizer import ByteTokenizer

PROMPT = "hello you"


@pytest.fixture(scope="module")
def server():
    model, tokenizer = (
        model_of("attnres-full", scatter=True, layers=2, vocab_size=257),
        ByteTokenizer(),
    )

    def look(prompt):
        return [
            headwater.inspect(
                model, tokenizer.encode(prompt).tolist(), tokenizer=tokenizer, name="mine"
            )
        ]

    with InspectorServer(look, PROMPT) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server, path="", method="GET", body=None, **headers):
    """Status and body; `Host` and other headers as they are given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, f"/{server.token}/{path}" if path is not None else "/", body, sent)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


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
    post = partial(ask, server, "inspect", "POST", json.dumps({"prompt": "abc"}))
    assert post()[0] == 200
    assert post(Origin=f"http://127.0.0.1:{port}")[0] == 200
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{port}"},
        {"Host": f"127.0.0.1:{port + 1}"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"https://127.0.0.1:{port}"},
        {"Sec_Fetch_Site": "cross-site"},
    ):
        for status, answer, _ in (post(**headers), ask(server, **headers)):
            assert (status, json.loads(answer)) == (403, {"error": "refused"}), headers


def test_without_its_token_nothing_answers(server):
    assert ask(server, None)[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    for path in (
        "/wrong/",
        f"/{server.token[:-1]}/",
        f"/{server.token}/../",
        "/inspect",
        f"/{server.token}/other",
    ):
        for method in ("GET", "POST"):
            connection.request(method, path, "{}" if method == "POST" else None)
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())) == (404, {"error": "not found"})
            connection.close()
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
    status, answer, _ = ask(server, "inspect", "POST", body)
    assert (status, capfd.readouterr().err) == (400, "")
    assert words in json.loads(answer)["error"]


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "many", ""])
def test_a_length_that_is_no_number_is_refused(server, length, capfd):
    status, answer, _ = ask(server, "inspect", "POST", "{}", Content_Length=length)
    assert (status, capfd.readouterr().err) == (400, "")
    assert "100000 bytes" in json.loads(answer)["error"]


def test_a_port_that_is_taken_is_named(server):
    with pytest.raises(UserError, match=f"port {server.server_port}"):
        InspectorServer(server.look, PROMPT, server.server_port)


def test_a_page_that_is_closed_while_the_model_runs_is_no_error(server, monkeypatch, capfd):
    asked, gone, ended = threading.Event(), threading.Event(), threading.Event()
    look, shutdown = server.look, server.shutdown_request

    def slow(prompt):
        asked.set()
        gone.wait(30)
        return look(prompt)

    def shut(request):
        shutdown(request)
        ended.set()

    monkeypatch.setattr(server, "look", slow)
    monkeypatch.setattr(server, "shutdown_request", shut)
    body = json.dumps({"prompt": PROMPT})
    with socket.create_connection(("127.0.0.1", server.server_port)) as client:
        head = f"POST /{server.token}/inspect HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert asked.wait(30)
        client.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # closing resets
    gone.set()
    assert ended.wait(30)
    assert capfd.readouterr().err == ""


@pytest.mark.browser
def test_the_page_asks_its_model_and_nobody_else(server, visit, tmp_path, monkeypatch):
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


@pytest.mark.browser
def test_what_is_wrong_with_a_prompt_is_said_in_the_page(server, browser):
    page = browser.new_page()
    page.goto(server.address)
    page.locator("#words").fill("a" * 40)
    page.locator("#prompt button").click()
    page.locator("#asked.wrong", has_text="context of 32").wait_for()
    assert page.locator("#prompt button").is_enabled()
    page.close()
