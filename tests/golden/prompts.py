"""Ten prompts of different kinds and lengths for the embedded model; the first two share a system prompt."""

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def chat(question: str) -> str:
    """A conversation of one turn, as the model's chat template spells it."""
    return f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


CAPITAL = chat("What is the capital of France?")

PROMPTS = [
    CAPITAL,
    chat("Write a short poem about a mill at a river, and give it a title."),
    "Once",
    'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n    if n < 2:\n',
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"]}\n{"name": "Alan Turing", "born":',
    "Le moulin à eau est une machine qui utilise l'énergie de la rivière pour",
    "你好，世界。今天天气",
    "Weather today: ☀️🌡️ 31 °C. Tomorrow: 🌧️⛈️",
    "| river | length in km |\n| --- | --- |\n| Nile | 6650 |\n| Amazon | 6400 |\n",
    "A water mill uses a water wheel or a turbine to drive a mechanical process such as milling, rolling or hammering. "
    "Such processes are needed in the production of many goods, among them flour, lumber, paper, textiles and metal "
    "products. One major way to tell water mills apart is by the wheel's orientation, vertical or horizontal: the "
    "first powered through a gear mechanism, the second without one. The water is brought to the wheel by a channel "
    "that is called the headrace, and what carries it away again is called",
]
