"""A prompt's answers in order: what the target is asked next once it has answered."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mlx.prompt import Message
from dflash_mlx.text import Channels, Reasoning
from dflash_mlx.tokenizer import Tokenizer
from dflash_mlx.train.prompts import Prompt


class Conversation:
    """The tokens of a prompt and, turn by turn, of what follows; tokens stay as generated.

    A later turn's prompt is what the chat template makes of the conversation so far. Where that
    begins with the text of the tokens so far, only what is new is encoded, as in a chat.
    """

    def __init__(
        self, prompt: Prompt, tokenizer: Tokenizer, thinking: bool | str | None = None
    ) -> None:
        self.prompt = prompt
        self.turn = 0
        self._tokenizer, self._thinking = tokenizer, thinking
        self._messages: list[Message] = [dict(m) for m in prompt.messages]
        self._text = ""
        if self._bare:
            self.ids = tokenizer.encode(prompt.messages[0]["content"])
        else:
            self._text = tokenizer.render(self._messages, thinking)
            self.ids = tokenizer.encode_plain(self._text)

    @property
    def _bare(self) -> bool:
        """Without a chat template one message is plain text to continue."""
        only = self.prompt.messages[0]["role"] == "user" and len(self.prompt.messages) == 1
        return not self._tokenizer.has_template and only and not self.prompt.further

    @property
    def name(self) -> str:
        """Of the answer that comes next."""
        return self.prompt.answer_names[self.turn]

    def answer(self, ids: Sequence[int]) -> bool:
        """Take the target's answer to `ids`; whether a further turn follows."""
        if self.turn == len(self.prompt.further):
            return False
        said, visible, end = self._words(ids)
        self._messages += [
            {"role": "assistant", "content": visible},
            {"role": "user", "content": self.prompt.further[self.turn]},
        ]
        text = self._tokenizer.render(self._messages, self._thinking)
        # Reasoning is left out by templates, so it must be encoded anew.
        so_far = self._text + said + end
        if said == visible and text.startswith(so_far):
            news = self._tokenizer.encode_plain(text[len(so_far) :])
            self.ids = [*self.ids, *ids, *news]
        else:
            self.ids = self._tokenizer.encode_plain(text)
        self._text = text
        self.turn += 1
        return True

    def _words(self, ids: Sequence[int]) -> tuple[str, str, str]:
        """(all text, text without reasoning, the end token's text) of an answer."""
        tokenizer = self._tokenizer
        ended = ids[-1] in tokenizer.end_ids
        stream = tokenizer.detokenizer()
        said = stream.add(list(ids[:-1] if ended else ids)) + stream.finish()
        opened = tokenizer.opens_thinking(self._text)
        split = (
            Channels(opened) if tokenizer.has_channels else Reasoning(tokenizer.think_tags, opened)
        )
        visible = split.feed(said)[1] + split.finish()[1]
        return said, visible, tokenizer.token_text(ids[-1]) if ended else ""
