"""Files of node profiles."""

import yaml


def profiles(directory, **specs):
    """*directory* with a file for each profile of these names, each with these entries."""
    directory.mkdir(exist_ok=True)
    for name, gpus in specs.items():
        document = {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "NodeProfile",
            "metadata": {"name": name},
            "spec": {"gpus": gpus},
        }
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return directory
