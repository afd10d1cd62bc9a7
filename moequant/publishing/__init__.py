"""Publish a converted checkpoint on the Hugging Face hub, with a model card."""

from moequant.publishing.files import PublishedFile
from moequant.publishing.plan import PushPlan, plan_push
from moequant.publishing.run import PushResult, push

__all__ = ["PublishedFile", "PushPlan", "PushResult", "plan_push", "push"]
