"""OpenAI's Responses API, translated to a chat request and back.

dialect         the record
request         the request bodies, and the chat requests that they mean
tools           the tools that a request offers, and its choice among them
calls           calls and their outputs as items, and how each kind is told
built_in        shells and patches, which the client runs and whose form the API has fixed
parts           the text in items
items           what a conversation is made of, and its way into chat messages
truncation      what is left of a conversation that is too long
output          the response object and its events
answers         the shapes of answers, for /openapi.json
"""
