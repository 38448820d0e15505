"""How requests are refused: 400, the field in the client's words, no prompt text."""

import pytest

from engine.errors import InvalidRequest
from protocol.body import parse_body
from protocol.errors import ApiError, to_api_error
from protocol.openai.chat import ChatCompletionRequest
from protocol.openai.completions import CompletionRequest
from tests.protocol.request_helpers import SECRET, USER, VOCAB, chat, completion, tool


def refusal(make, fields):
    try:
        request = make(**fields)
        request.to_sampling_params(VOCAB)
        if isinstance(request, CompletionRequest):
            request.prompts(VOCAB)
    except (ApiError, InvalidRequest) as exc:
        return to_api_error(exc)
    return pytest.fail("was accepted")


# Each: the fields, the param that the answer names, and words that its message must hold.
BAD_FOR_BOTH = [
    ({"model": 5}, "model", "must be a string, got 5"),
    ({"temperature": "hot"}, "temperature", "must be a number, got 'hot'"),
    ({"temperature": True}, "temperature", "must be a number, got true"),
    ({"temperature": 2.5}, "temperature", "[0.0, 2.0], got 2.5"),
    ({"temperature": -0.1}, "temperature", "got -0.1"),
    ({"top_p": 0}, "top_p", "(0.0, 1.0]"),
    ({"top_p": 1.5}, "top_p", "got 1.5"),
    ({"top_k": -2}, "top_k", "got -2"),
    ({"top_k": 1.5}, "top_k", "must be an integer, got 1.5"),
    ({"min_p": 2}, "min_p", "[0.0, 1.0]"),
    ({"n": 0}, "n", "[1, 128], got 0"),
    ({"n": 1_000_000}, "n", "got 1000000"),
    ({"n": "2"}, "n", "must be an integer, got '2'"),
    ({"n": True}, "n", "must be an integer, got true"),
    ({"n": 1e308}, "n", "must be an integer"),
    ({"n": [SECRET]}, "n", "got an array of 1"),
    ({"n": {"a": SECRET}}, "n", "got an object"),
    ({"stop": 5}, "stop", "a string or an array of strings, got 5"),
    ({"stop": ""}, "stop", "empty string"),
    ({"best_of": 3}, "best_of", "best_of must equal n (1)"),
    ({"best_of": 1, "n": 2}, "best_of", "best_of must equal n (2)"),
    ({"stop": ["a", 5]}, "stop.1", "must be a string, got 5"),
    ({"stop": ["x"] * 17}, "stop", "at most 16 entries, got 17"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", f"got {VOCAB}"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "got -1"),
    ({"stop_token_ids": ["2"]}, "stop_token_ids.0", "must be an integer"),
    ({"seed": 1.5}, "seed", "must be an integer"),
    ({"seed": 2**63}, "seed", "seed must be in"),
    ({"frequency_penalty": 3}, "frequency_penalty", "[-2.0, 2.0], got 3"),
    ({"presence_penalty": -3}, "presence_penalty", "got -3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "got 0"),
    ({"logit_bias": {"5": 1, "cat": 1}}, "logit_bias", "has the key 'cat'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "the key a string of 5000 characters"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", "must be a number"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "[-100.0, 100.0], got 101"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", f"got {VOCAB}"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object"),
    ({"max_tokens": 0}, "max_tokens", "got 0"),
    ({"max_tokens": -5}, "max_tokens", "got -5"),
    ({"max_tokens": 5.0}, "max_tokens", "must be an integer, got 5.0"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most max_tokens (5), got 6"),
    ({"min_tokens": -1}, "min_tokens", "got -1"),
    ({"stream": "yes"}, "stream", "true or false, got 'yes'"),
    ({"stream": 1}, "stream", "true or false, got 1"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ({"stream": True, "stream_options": 5}, "stream_options", "must be an object"),
    ({"ignore_eos": "true"}, "ignore_eos", "true or false"),
    ({"skip_special_tokens": 0}, "skip_special_tokens", "true or false"),
    ({"include_stop_str_in_output": 0}, "include_stop_str_in_output", "true or false"),
    ({"priority": 2**40}, "priority", "at most"),
    ({"echo": 1}, "echo", "true or false"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "[-1, 20], got 21"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "[-1, 20], got -2"),
    ({"cache_salt": ""}, "cache_salt", "a string of 0 characters"),
    ({"cache_salt": SECRET + "@"}, "cache_salt", "text that matches"),
    ({"cache_salt": "a" * 129}, "cache_salt", "a string of 129 characters"),
    ({"request_id": "two words"}, "request_id", "text that matches"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1"),
    ({"truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
    ({"typical_p": 0.5}, "typical_p", "leave it out or send 1"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "got 1000000"),
    ({"bad_words": [" "]}, "bad_words", "not be blank"),
    ({"bad_words": ["a" * 129]}, "bad_words", "1 to 128 characters"),
    ({"bad_words": "word"}, "bad_words", "array"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "requires logprobs"),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids", "at most 128 entries, got 129"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
]


BAD_CHATS = [
    ({"messages": None}, "messages", "messages is required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": SECRET}, "messages", "must be an array, got a string of 37 characters"),
    ({"messages": [SECRET]}, "messages.0", "must be an object"),
    ({"messages": [{"content": SECRET}]}, "messages.0.role", "messages.0.role is required"),
    ({"messages": [{"role": "robot", "content": SECRET}]}, "messages.0.role", "got 'robot'"),
    ({"messages": [{"role": SECRET * 2, "content": SECRET}]}, "messages.0.role", "got a string of 74 characters"),
    ({"messages": [*USER, {"role": "user"}]}, "messages.1.content", "messages.1.content is required"),
    ({"messages": [{"role": "system", "content": None}]}, "messages.0.content", "is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a string or an array of text parts, got 5"),
    ({"messages": [{"role": "user", "content": {"text": SECRET}}]}, "messages.0.content", "got an object"),
    ({"messages": [{"role": "user", "content": [SECRET]}]}, "messages.0.content.0", "must be an object"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
        "messages.0.content.0.text",
        "must be a string, got 7",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages.0.content.1.type",
        "is 'image_url', which is not supported by this server; send text",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages.0.tool_calls.0.function",
        "messages.0.tool_calls.0.function is required",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages.0.tool_calls",
        "only allowed in messages of the assistant",
    ),
    ({"messages": [{"role": "user", "content": "a", "reasoning": SECRET}]}, "messages.0.reasoning", "only allowed"),
    (
        {"max_completion_tokens": 0},
        "max_completion_tokens",
        "max_completion_tokens must be at least 1, or -1 for as many as fit, got 0",
    ),
    ({"max_completion_tokens": -2, "max_tokens": 5}, "max_completion_tokens", "got -2"),
    ({"max_completion_tokens": 4, "min_tokens": 6}, "min_tokens", "at most max_completion_tokens (4)"),
    ({"logprobs": 5}, "logprobs", "true or false"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be in [-1, 20], got 21"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "got -2"),
    ({"logprobs": True, "top_logprobs": "2"}, "top_logprobs", "must be an integer"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools; send some"),
    ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "needs tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "but got web_search"),
    ({"tools": [{"name": "f"}]}, "tools.0.type", "is required: one of function, custom."),
    ({"thinking_token_budget": -5}, "thinking_token_budget", "must be at least 0, or -1 for none, got -5"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "is 'xml', which is not supported"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function is required"),
    ({"tools": [tool("")]}, "tools.0.function.name", ""),
    ({"tools": [tool("a b")]}, "tools.0.function.name", ""),
    ({"tools": [tool("f"), tool("f")]}, "tools", "'f' comes twice"),
    ({"tools": [tool("f")] * 1025}, "tools", "at most 1024 tools"),
    ({"tools": [tool("f", description="d" * 2**21)]}, "tools", "at most 2097152 bytes"),
    ({"tools": [tool("f", description="a" * 65536, parameters=[])]}, "tools.0.function.parameters", "an object"),
    ({"tools": [tool("f", parameters={"a": "b" * 65536})]}, "tools.0.function.parameters", "65536 bytes"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [tool("f")], "tool_choice": "some"}, "tool_choice", """{"name": "..."}}, got 'some'"""),
    ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
    ({"tools": [tool("f")], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "'web_search'"),
    ({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "is required"),
    ({"tools": [tool("f")], "functions": [{"name": "f"}]}, "functions", "send only tools"),
    (
        {"functions": [{"name": "f"}], "function_call": {"name": "g"}},
        "function_call",
        "'g', which is none of functions",
    ),
    (
        {"functions": [{"name": "f"}], "function_call": "required"},
        "function_call",
        """must be none, auto or {"name": "..."}, got 'required'""",
    ),
    ({"function_call": {"name": "g"}}, "function_call", "needs functions"),
    ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools.0.custom.name", ""),
    (
        {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "gbnf"}}}]},
        "tools.0.custom.format.type",
        "'gbnf'",
    ),
    ({"tools": [tool("f")], "tool_choice": 5}, "tool_choice", "none, auto, required or"),
    ({"tools": [tool("f")], "tool_choice": "required", "guided_choice": ["a"]}, "guided_choice", "leave one out"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude each other"),
    (
        {"continue_final_message": True, "messages": [{"role": "assistant", "content": ""}]},
        "continue_final_message",
        "a final message with content",
    ),
    ({"documents": [{"text": "a" * 2**18}]}, "documents", "at most 262144 bytes"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "got 'huge'"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "set by the server"),
]
BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt", "prompt is required"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [""]}, "prompt", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "must not be empty"),
    ({"prompt": [[1], []]}, "prompt", "must not be empty"),
    ({"prompt": 5}, "prompt", "got 5"),
    ({"prompt": {"text": SECRET}}, "prompt", "got an object"),
    ({"prompt": [SECRET, 5]}, "prompt.1", "must be a string, got 5"),
    ({"prompt": [5, SECRET]}, "prompt.1", "must be an integer"),
    ({"prompt": [True]}, "prompt.0", "must be an integer, got true"),
    ({"prompt": [1.5]}, "prompt.0", "got 1.5"),
    ({"prompt": [[1, SECRET]]}, "prompt.0.1", "must be an integer"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 prompts, got 1025"),
    ({"prompt": [-1]}, "prompt", "[0, 999], got -1"),
    ({"prompt": [[1], [VOCAB]]}, "prompt", "[0, 999], got 1000"),
    ({"logprobs": True}, "logprobs", "must be an integer"),
    ({"logprobs": 0, "logprob_token_ids": [VOCAB]}, "logprob_token_ids", "[0, 999], got 1000"),
    ({"logprobs": 21}, "logprobs", "logprobs must be in [-1, 20], got 21"),
    ({"suffix": "end"}, "suffix", "not supported"),
]
CASES = [
    *[(make, *case) for make in (chat, completion) for case in BAD_FOR_BOTH],
    *[(chat, *case) for case in BAD_CHATS],
    *[(completion, *case) for case in BAD_COMPLETIONS],
]


@pytest.mark.parametrize(
    ("make", "fields", "param", "words"),
    CASES,
    ids=[f"{make.__name__}-{param}-{i}" for i, (make, _, param, _) in enumerate(CASES)],
)
def test_bad_input_is_a_400_that_names_the_field_and_no_prompt_text(make, fields, param, words):
    error = refusal(make, fields)
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert words in error.message
    assert SECRET not in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b'{"messages": [', "line 1, column 15"),
        (b'{\n "prompt": tReAsUrE}', "line 2, column"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": 1e400}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "must be an object, got an array of 2"),
        (b'"tReAsUrE"', "must be an object"),
        (b"null", "must be an object, got null"),
    ],
)
def test_broken_json_is_a_400_that_says_where_and_echoes_nothing(body, words):
    with pytest.raises(ApiError) as caught:
        parse_body(ChatCompletionRequest, body)
    assert caught.value.status == 400
    assert caught.value.param is None
    assert words in caught.value.message
    assert "tReAsUrE" not in caught.value.message
    assert caught.value.__context__ is None or caught.value.__suppress_context__  # no text in a traceback either


def test_an_integer_wider_than_64_bits_is_no_integer():
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionRequest, b'{"prompt": [[1], [99999999999999999999]]}')
    assert caught.value.param == "prompt.1.0"
