"""Chat messages to the text that vLLM would tokenize. Pure; what cannot be said exactly is Inexact, with a word why.

Follows what vLLM makes of a request before its template sees it, for text: contents of parts are joined by line breaks
or left as parts, as the template wants them; arguments of tool calls are objects; tools have all their fields. Images,
other parts, and roles that vLLM rewrites for some templates are left to it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

import msgspec

from adaptersync.router.asked import NOTHING, NULL, Asked

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # as transformers has it: a template that trims it is told by the missing space
_REWRITTEN = "x-anthropic-billing-header"  # vLLM drops this line of a system message
# what a request may not tell its template, or what changes how it is applied
_RESERVED = {"chat_template", "conversation", "max_length", "messages", "padding", "return_assistant_tokens_mask"}
_RESERVED |= {"return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"}


class Inexact(Exception):
    """vLLM may make something else of it. `reason` is one word, for the metrics."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ChatTemplates:
    """`templates` by name, `special` the tokens they may name. Loads jinja2."""

    def __init__(self, templates: Mapping[str, str], special: Mapping[str, str]) -> None:
        from jinja2 import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import CallBlock
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`generation` marks what an assistant said, for training; here it is its content."""

            tags = {"generation"}  # noqa: RUF012  # jinja2 wants it so

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

            def _said(self, caller: Any) -> Any:
                return caller()

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._sources = dict(templates)
        self._compiled = {name: environment.from_string(source) for name, source in templates.items()}
        self._loops = {name: _loops_over_contents(environment.parse(source)) for name, source in templates.items()}
        self._special = dict(special)

    def render(self, asked: Asked) -> str:
        """The whole prompt. Inexact, or whatever a template raises."""
        if asked.chat_template not in NULL:
            raise Inexact("template")
        values: dict[str, Any] = _decoded(asked.chat_template_kwargs, dict[str, Any], {})
        if not _RESERVED.isdisjoint(values):
            raise Inexact("template")
        values = {"documents": None} | {name: value for name, value in values.items() if value not in (None, "auto")}
        if (effort := _decoded(asked.reasoning_effort, str, None)) is not None:
            values = {"enable_thinking": effort != "none"} | values | {"reasoning_effort": effort}
        if (documents := _decoded(asked.documents, list[dict[str, str]], None)) is not None:
            values["documents"] = documents
        tools = _tools(asked)
        name = "tool_use" if tools is not None and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise Inexact("template")
        values |= {"tools": tools, "add_generation_prompt": _flag(asked.add_generation_prompt, True)}
        goes_on = _flag(asked.continue_final_message, False)
        values.pop("continue_final_message", None)
        if goes_on and values["add_generation_prompt"]:
            raise Inexact("fields")  # vLLM refuses it
        messages = _decoded(asked.messages, list[dict[str, Any]], [])
        texts = self._apply(name, _conversation(messages, as_parts=False), values, goes_on=goes_on)
        # a template that loops over contents may be one to which vLLM hands parts, which it finds out in a way of its
        # own: it makes no difference to most of them
        if self._loops[name] and texts != self._apply(
            name, _conversation(messages, as_parts=True), values, goes_on=goes_on
        ):
            raise Inexact("parts")
        return texts

    def _apply(self, name: str, messages: list[dict[str, Any]], values: dict[str, Any], *, goes_on: bool) -> str:
        if goes_on:
            final = _mark(messages[-1])
            if "content" not in self._sources[name]:
                raise Inexact("template")
        text: str = self._compiled[name].render(**(self._special | values | {"messages": messages}))
        if goes_on:
            at = text.rfind(_MARK.strip())
            if at < 0 or final.strip() not in text:
                raise Inexact("template")
            kept = text[at : at + len(_MARK)] == _MARK
            text = text[:at] if kept else text[:at].rstrip()
        return text


def _mark(message: dict[str, Any]) -> str:
    """Puts the mark where the last message goes on; returns the text before it."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    if not content:
        raise Inexact("fields")
    text: str = content[-1]["text"]
    content[-1]["text"] = text + _MARK
    return text


def _conversation(messages: list[dict[str, Any]], *, as_parts: bool) -> list[dict[str, Any]]:
    if not messages:
        raise Inexact("fields")
    return [_message(message, as_parts=as_parts) for message in messages]


def _message(given: dict[str, Any], *, as_parts: bool) -> dict[str, Any]:
    role = given.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise Inexact("role")
    texts = _texts(given.get("content"))
    if role == "system" and any(text.startswith(_REWRITTEN) for text in texts):
        raise Inexact("parts")
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if as_parts and role != "tool":
        message["content"] = [{"type": "text", "text": text} for text in texts]
    if role == "assistant":
        if calls := given.get("tool_calls"):
            message["tool_calls"] = [_tool_call(call) for call in calls]
        if (reasoning := given.get("reasoning")) is not None:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and "tool_call_id" in given:
        message["tool_call_id"] = given["tool_call_id"]
    message |= {name: given[name] for name in ("name", "task") if isinstance(given.get(name), str)}
    return message


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise Inexact("fields")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise Inexact("parts")
        if not isinstance(part["text"], str):
            raise Inexact("parts")
        texts.append(part["text"])
    return texts


def _tool_call(given: Any) -> dict[str, Any]:
    """With arguments that are an object, whatever was sent."""
    function = given.get("function") if isinstance(given, dict) else None
    if (
        not isinstance(function, dict)
        or given.keys() != {"id", "type", "function"}
        or given["type"] != "function"
        or function.keys() != {"name", "arguments"}
    ):
        raise Inexact("tools")
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        raise Inexact("tools")
    try:
        parsed = json.loads(arguments) if arguments else {}
    except json.JSONDecodeError:
        parsed = {}
    return {
        "id": given["id"],
        "function": {"arguments": parsed if isinstance(parsed, dict) else {}, "name": function["name"]},
        "type": "function",
    }


def _tools(asked: Asked) -> list[dict[str, Any]] | None:
    given = _decoded(asked.tools, list[dict[str, Any]], None)
    if given is None:
        return None
    if asked.tool_choice == msgspec.Raw(b'"none"'):
        raise Inexact("tools")  # whether they are shown is a setting of vLLM
    tools = []
    for tool in given:
        function = tool.get("function")
        if (
            not isinstance(function, dict)
            or tool.keys() - {"type", "function"}
            or tool.get("type", "function") != "function"
            or "name" not in function
            or function.keys() - {"name", "description", "parameters"}
        ):
            raise Inexact("tools")
        fields = {name: function.get(name) for name in ("name", "description", "parameters")}
        tools.append({"type": "function", "function": fields})
    return tools


def _flag(raw: msgspec.Raw, default: bool) -> bool:
    if raw == NOTHING:
        return default
    return bool(_decoded(raw, bool, default))


def _decoded(raw: msgspec.Raw, kind: Any, default: Any) -> Any:
    if raw in NULL:
        return default
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise Inexact("fields") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in Python, not as jinja2 has it, which is for pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _loops_over_contents(template: Any) -> bool:
    """Whether some loop may be over a message's content, also by way of a macro; rather too often than too seldom."""
    from jinja2.nodes import Call, For, Macro, Name

    calls = [call for call in template.find_all(Call) if any(map(_mentions_content, (*call.args, *call.kwargs)))]
    called = {call.node.name for call in calls if isinstance(call.node, Name)}
    names = {"content"} | {
        argument.name for macro in template.find_all(Macro) if macro.name in called for argument in macro.args
    }
    return any(_mentions_content(loop.iter, names) for loop in template.find_all(For))


def _mentions_content(expression: Any, names: Collection[str] = ("content",)) -> bool:
    from jinja2.nodes import Const, Getattr, Getitem, Name

    return any(
        (isinstance(node, Getattr) and node.attr == "content")
        or (isinstance(node, Getitem) and isinstance(node.arg, Const) and node.arg.value == "content")
        or (isinstance(node, Name) and node.name in names)
        for node in (expression, *expression.find_all((Getattr, Getitem, Name)))
    )
