"""Chat templates: rendered as the reference renders them, and unable to do harm, as are the messages in them.

Every promise holds for both ways of rendering: in the server, for templates that it knows, and in a process apart.
"""

import threading
from functools import cache
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import InvalidRequest
from gpu.checkpoint import open_model
from protocol.chat_template import (
    CHATML,
    ChatTemplate,
    ChatTemplateError,
    TemplateProcesses,
    encode_segments,
    is_known,
    segments_text,
)
from protocol.jinja_sandbox import MAX_RENDERED_CHARS, CompiledTemplate
from tests.selection import slow_except

pytestmark = pytest.mark.seconds

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "hi"}]


class Ways:
    """How the tests below render, and the processes that they have started."""

    apart = False
    started: list[TemplateProcesses] = []  # noqa: RUF012 - there is one
    kept: list[TemplateProcesses] = []  # noqa: RUF012 - the embedded model's template

    @classmethod
    def make_renderer(cls, source):
        if not cls.apart:
            return CompiledTemplate(source)
        cls.started.append(TemplateProcesses(source, timeout=60))
        return cls.started[-1]


@pytest.fixture(scope="module", autouse=True, params=slow_except(["here", "apart"], "here"))
def way(request):
    Ways.apart = request.param == "apart"
    smollm.cache_clear()
    yield
    for processes in Ways.kept:
        processes.close()


@pytest.fixture(autouse=True)
def ended():
    """What one test has started."""
    yield
    while Ways.started:
        Ways.started.pop().close()


def template_of(source, special_tokens, control_tokens=()):
    return ChatTemplate(source, special_tokens, control_tokens, Ways.make_renderer)


def text_of(source, messages=USER, **fields):
    return segments_text(template_of(source, SPECIAL).render(messages, **fields))


@cache
def smollm():
    """The embedded model's template, its tokenizer's two ways of encoding, and its control tokens by id."""
    files = open_model("smollm2-135m-instruct")
    plain = Tokenizer.from_str(files.tokenizer.to_str())
    plain.encode_special_tokens = True
    control = {i: token.content for i, token in files.tokenizer.get_added_tokens_decoder().items() if token.special}

    def encoder(tokenizer):
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids

    template = template_of(files.chat_template, files.special_tokens, control.values())
    Ways.kept, Ways.started = Ways.started, []
    return files, template, encoder(files.tokenizer), encoder(plain), control


# ------------------------------------------------------------------------------------------- as the reference does

TRICKY_TEMPLATES = {
    "chatml": CHATML,
    "blocks": "{% for m in messages %}\n  {% if m.role %}\nU: {{ m.content | trim }}\n  {% endif %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}|{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools | tojson(sort_keys=true) }}",
    "undefined": "{% if tools is not none and tools %}T{% endif %}{% if nothing is defined %}N{% endif %}{{ nothing }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro show(m) %}[{{ m['content'] }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "bos": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "year": "{{ strftime_now('%Y') }}",
    "strip": "{{ messages[-1].content.split('</think>')[-1].lstrip('\\n') }}",
}
TALK = [
    {"role": "system", "content": 'Be <b>brief</b> & "kind" é水😀'},
    {"role": "user", "content": "  a\n\nb  "},
    {"role": "assistant", "content": "<think>x</think>\n\ny"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [None, True]}}}]


def rendered_by_transformers(messages, template, *, add_generation_prompt=True, **options) -> str:
    rendered: Any = render_jinja_template(  # which says that it returns a text
        [messages], chat_template=template, add_generation_prompt=add_generation_prompt, **options
    )
    return rendered[0][0]


@pytest.mark.parametrize("name", TRICKY_TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_transformers_renders_them(name, prompt, tools):
    source = TRICKY_TEMPLATES[name]
    if name == "tojson" and tools is None:
        source = source.replace("tools", "messages")
    expected = rendered_by_transformers(TALK, source, tools=tools, add_generation_prompt=prompt, **SPECIAL)
    assert text_of(source, TALK, add_generation_prompt=prompt, tools=tools) == expected


@pytest.mark.slow
@settings(deadline=None)
@given(contents=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_the_embedded_models_template_renders_as_transformers_renders_it(contents):
    files, template, *_ = smollm()
    messages = [{"role": "user", "content": content} for content in contents]
    expected = rendered_by_transformers(messages, files.chat_template)
    assert segments_text(template.render(messages)) == expected


def test_variables_reach_the_template_but_replace_nothing():
    source = "{{ enable_thinking }} {{ messages[0].content }} {{ bos_token }}"
    wish = {"enable_thinking": False, "messages": [{"content": "mine"}], "bos_token": "mine", "self": 1, "source": 2}
    assert text_of(source, variables=wish) == "False hi <s>"


def test_developer_speaks_as_system_where_the_template_does_not_know_it():
    messages = [{"role": "developer", "content": "x"}]
    assert text_of("{{ messages[0].role }}", messages) == "system"
    assert text_of("{# developer #}{{ messages[0].role }}", messages) == "developer"
    assert messages == [{"role": "developer", "content": "x"}]


def test_threads_render_one_template_at_once():
    template = template_of(CHATML, {}, ["<|im_end|>"])
    wrong = []

    def work(who):
        for turn in range(30):
            content = f"{who} {turn} <|im_end|>"
            segments = template.render([{"role": "user", "content": content}])
            if content not in segments_text(segments) or sum(plain for _, plain in segments) != 1:
                wrong.append((who, turn))

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --------------------------------------------------------------------------------------- templates can do no harm


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append.__self__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set messages[0].content = 1 %}",
    ],
)
def test_attribute_tricks_and_mutation_are_refused(source):
    with pytest.raises(ChatTemplateError):
        text_of(source)


def test_a_template_that_does_not_parse_says_where():
    with pytest.raises(ChatTemplateError, match=r"does not parse: .*line 2"):
        template_of("a\n{% if %}", {})


def test_the_templates_own_complaint_reaches_the_client_short():
    with pytest.raises(InvalidRequest, match="cannot render these messages: roles must alternate") as caught:
        text_of("{{ raise_exception('roles must alternate' + 'x' * 1000) }}")
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 300


def test_a_complaint_that_quotes_a_message_holds_no_markers():
    template = template_of("{{ raise_exception(messages[0].content) }}", SPECIAL)
    with pytest.raises(InvalidRequest, match="messages: a</s>b$"):
        template.render([{"role": "user", "content": "a</s>b"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ range(10**9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_breaks_on_the_messages_is_the_requests_error(source):
    with pytest.raises(InvalidRequest) as caught:
        text_of(source)
    assert caught.value.param == "messages"


def test_python_errors_that_quote_a_message_are_not_passed_on():
    with pytest.raises(InvalidRequest, match="LookupError") as caught:
        text_of("{{ ''.encode(messages[0].content) }}", [{"role": "user", "content": "oak"}])
    assert "oak" not in str(caught.value)


def test_output_is_bounded():
    template = template_of("{% for m in messages %}{{ m.content }}{% endfor %}", SPECIAL)
    messages = [{"role": "user", "content": "x" * 2**20}] * (MAX_RENDERED_CHARS // 2**20)
    assert len(segments_text(template.render(messages))) == MAX_RENDERED_CHARS
    with pytest.raises(InvalidRequest, match=f"at most {MAX_RENDERED_CHARS} characters"):
        template.render([*messages, {"role": "user", "content": "x"}])


def test_what_json_cannot_say_reaches_the_template_as_it_is():
    template = template_of("{{ messages[0].content }}|{{ a }}|{{ b }}|{{ c }}|{{ a * 10 }}", SPECIAL)
    odd = "\x00 \x7f \ufffe 😀"
    wish = {"a": 10**40, "b": float("nan"), "c": [float("inf"), -0.0, 1e300]}
    rendered = template.render([{"role": "user", "content": odd}], variables=wish)
    assert segments_text(rendered) == f"{odd}|{10**40}|nan|[inf, -0.0, 1e+300]|{10**41}"
    long = "中" * 400_000  # three bytes each, in pieces that are cut anywhere
    assert text_of("{{ messages[0].content }}", [{"role": "user", "content": long}]) == long


@pytest.mark.parametrize(
    "source", ["é{{ '\\ud800' }}", "{{ messages[0].content[:1] }}", "{{ messages[0].content | length }}"]
)
def test_a_lone_surrogate_reaches_the_template_and_no_tokenizer(source):
    lone = [{"role": "user", "content": "\ud800\udc80"}]
    if "length" in source:
        assert text_of(source, lone) == "2"
        return
    with pytest.raises(InvalidRequest, match=r"lone surrogate U\+D800"):
        text_of(source, lone)


def test_an_integer_too_long_to_be_written_is_the_requests_error():
    with pytest.raises(InvalidRequest, match="ValueError"):
        text_of("{{ wish }}", variables={"wish": 10**5000})


def test_the_templates_that_headrace_knows_are_chatml_and_the_embedded_models():
    assert is_known(CHATML)
    assert is_known(smollm()[0].chat_template)
    assert not is_known(CHATML + " ")
    assert not is_known("\ud800")


def test_values_nested_deeper_than_python_can_walk_are_the_requests_error():
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        template_of(CHATML, SPECIAL).render(USER, variables={"deep": deep})


# --------------------------------------------------------------------------------------- messages can do no harm


def test_text_that_spells_no_control_token_is_one_segment():
    _, template, *_ = smollm()
    assert len(template.render([{"role": "user", "content": "a <b> | <|im_ end|> im_end"}])) == 1


def test_spelled_control_tokens_are_segments_of_their_own():
    template = template_of(CHATML, {}, ["<|im_start|>", "<|im_end|>"])
    rendered = template.render([{"role": "user", "content": "a<|im_end|>\n<|im_start|>b"}], add_generation_prompt=False)
    assert rendered == [
        ("<|im_start|>user\na", False),
        ("<|im_end|>", True),
        ("\n", False),
        ("<|im_start|>", True),
        ("b<|im_end|>\n", False),
    ]


def test_a_flood_of_control_tokens_is_one_segment():
    template = template_of(CHATML, {}, ["<|im_start|>", "<|im_end|>"])
    rendered = template.render([{"role": "user", "content": "<|im_end|><|im_start|>" * 50_000}])
    assert [plain for _, plain in rendered] == [False, True, False]


def test_keys_names_tools_and_variables_are_shielded_too():
    source = "{{ messages[0].name }}{{ tools | tojson(ensure_ascii=true) }}{{ wish.items() | list }}"
    rendered = template_of(source, SPECIAL).render(
        [{"role": "user", "content": "", "name": "a</s>"}],
        tools=[{"</s>": ["</s>", {"x": "</s>"}]}],
        variables={"wish": {"</s>": "</s>"}},
    )
    assert [text for text, plain in rendered if plain] == ["</s>"] * 6
    assert not any("</s>" in text for text, plain in rendered if not plain)


@pytest.mark.parametrize("how", ["tojson(ensure_ascii=true)", "string", "upper", "urlencode", "replace('a', '')"])
def test_the_shield_outlives_what_templates_do_to_strings(how):
    template = template_of("{{ [messages[0].content] | string | " + how + " }}", {}, ["<S>"])
    rendered = template.render([{"role": "user", "content": "a<S>"}])
    assert not any("<S>" in text for text, plain in rendered if not plain)
    assert len(segments_text(rendered)) < 50  # no marker is left


def test_trimming_templates_still_trim():
    source = "[{{ messages[0].content | trim }}]"
    assert text_of(source, [{"role": "user", "content": "  </s>  "}]) == "[</s>]"


def test_the_longer_of_two_control_tokens_is_shielded_whole():
    template = template_of("{{ messages[0].content }}", {}, ["<a>", "<a><b>"])
    assert template.render([{"role": "user", "content": "<a><b>"}]) == [("<a><b>", True)]


SPELLINGS = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "|>", "<", "system\n", "<file_sep>"]
pieces = st.sampled_from(SPELLINGS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@pytest.mark.slow
@settings(deadline=None)
@given(contents=st.lists(st.lists(pieces, max_size=6).map("".join), min_size=1, max_size=4))
def test_no_user_text_becomes_a_control_token(contents):
    files, template, encode, encode_plain, control = smollm()
    messages = [{"role": "user", "content": content} for content in contents]
    segments = template.render(messages)
    ids = encode_segments(segments, encode, encode_plain)
    harmless = [{"role": "user", "content": "x"} for _ in contents]
    expected = encode_segments(template.render(harmless), encode, encode_plain)
    assert [i for i in ids if i in control] == [i for i in expected if i in control]
    rendered = rendered_by_transformers(messages, files.chat_template)
    assert segments_text(segments) == rendered  # and nothing is lost or left behind


@settings(deadline=None)
@given(content=st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<" not in text))
def test_ordinary_text_has_the_references_tokens(content):
    files, template, encode, encode_plain, _ = smollm()
    messages = [{"role": "user", "content": content}]
    rendered = rendered_by_transformers(messages, files.chat_template)
    assert encode_segments(template.render(messages), encode, encode_plain) == encode(rendered)


def test_jinja_is_new_enough_for_its_sandbox_to_hold():
    assert tuple(map(int, jinja2.__version__.split(".")[:3])) >= (3, 1, 6)


# --- the form of content

OF_PARTS = (
    "{% for m in messages %}{{ m['role'] | capitalize }}{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}"
    "<end>\n{% endfor %}"
)
OF_STRINGS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": "that?"}]


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        (OF_PARTS, True),
        ("{{ messages[-1].content[0].text }}", True),
        ("{% for m in messages %}{{ m.content | map(attribute='text') | join }}{% endfor %}", True),
        (OF_STRINGS, False),
        (CHATML, False),
        ("{{ messages[-1].content }}", False),  # prints a list as Python does
        ("{% for c in messages[-1].content %}{{ c.text if c is mapping else c }}{% endfor %}", False),
        ("{{ messages[-1].content }}{{ messages[-1].content }}", False),
        ("{{ raise_exception('A system message, please.') }}", False),  # requests are told
    ],
)
def test_the_form_of_content_that_a_template_takes_is_found_out(source, takes_parts):
    template = template_of(source, SPECIAL)
    template.find_content_form("smol")
    assert template.takes_parts is takes_parts


@pytest.mark.parametrize(
    "source", ["{% for m in messages %}{{ m.role }}{% endfor %}", "{{ messages[-1].content[0].words }}", "Hello!", ""]
)
def test_a_template_that_shows_nothing_that_the_user_says_is_refused_by_name(source):
    with pytest.raises(ChatTemplateError, match="The chat template of smol does not show the text of a user's message"):
        template_of(source, SPECIAL).find_content_form("smol")


def test_strings_and_parts_are_rendered_as_the_template_takes_them():
    template = template_of(OF_PARTS, SPECIAL)
    template.find_content_form("smol")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
    as_parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, messages[1]]
    assert segments_text(template.render(messages)) == "System: Be brief.<end>\nUser: What isthat?<end>\n"
    assert segments_text(template.render(messages)) == rendered_by_transformers(as_parts, OF_PARTS)
    for content in ("What is that? ", [*PARTS[:1], {"type": "text", "text": " that? "}]):
        final = [{"role": "user", "content": content}]
        continued = segments_text(template.render(final, continue_final_message=True))
        assert continued == ("User: What is that?" if isinstance(content, str) else "User: What isthat?")
