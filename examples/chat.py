"""Chat for two turns with OpenAI's own client (`pip install openai`), through the gateway of a
running mesh: `treadle up` in one terminal, `python examples/chat.py` in another.

Both requests name one session, so the mesh knows that they are turns of one trajectory: it ranks
and places it as a whole, and the engine computes only what the second turn adds. Closing the
session ends the trajectory in the mesh.
"""

import sys
import urllib.request
import uuid

import openai

QUESTIONS = ("Name a colour.", "Name another one.")


def main(url: str) -> None:
    """Send both questions and print the answers."""
    session = f"chat-{uuid.uuid4().hex[:8]}"
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", default_headers={"X-Session-ID": session}
    )
    model = client.models.list().data[0].id
    messages: list[openai.types.chat.ChatCompletionMessageParam] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24)
        said = answer.choices[0].message.content or ""
        print(f"{question} -> {said!r}")
        messages.append({"role": "assistant", "content": said})
    urllib.request.urlopen(
        urllib.request.Request(f"{url}/sessions/{session}", method="DELETE")
    ).close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7409")
