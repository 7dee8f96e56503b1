"""Text from a model whose experts run in three other processes, with plain transformers calls."""

import secrets

from expertwire import Client
from expertwire import transformers as expertwire_transformers
from expertwire.demo import demo_model_path
from expertwire.generate import load_tokenizer
from expertwire.processes import ChildGroup

path = demo_model_path()
token = secrets.token_hex(32)
env = {"EXPERTWIRE_TOKEN": token}

with ChildGroup() as children:
    registry = children.start("registry", ["registry", "--listen", "127.0.0.1:0"], env)
    address = registry.wait_line("listening on", 60).split()[-1]
    for experts in ("0-5", "6-10", "11-15"):
        serve = ["serve", path, "--experts", experts, "--registry", address, "--threads", "1"]
        children.start(f"server-{experts}", serve, env)
    with Client(address, token=token.encode()) as client:
        client.wait_ready(60)
        model = expertwire_transformers.load(path, client)  # reads no expert weights
        tokenizer = load_tokenizer(path)
        inputs = tokenizer("def read_lines(path):\n", return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        print(tokenizer.decode(output[0], skip_special_tokens=True))
        for name, server in client.stats()["servers"].items():
            print(f"{name}: {server['rows']} rows, median reply after {server['p50_us']:.0f} us")
