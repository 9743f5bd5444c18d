{{/* What several objects call each other by. */}}

{{/* At most 48 characters, so that <fullname>-kubelet-plugin is a valid name everywhere. */}}
{{- define "dra-driver-gpu.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "dra-driver-gpu.kubelet-plugin" -}}
{{- include "dra-driver-gpu.fullname" . -}}-kubelet-plugin
{{- end -}}

{{/* The account of the plugin. */}}
{{- define "dra-driver-gpu.kubelet-plugin.account" -}}
{{- .Values.serviceAccount.name | default (include "dra-driver-gpu.kubelet-plugin" .) -}}
{{- end -}}

{{- define "dra-driver-gpu.mps-agent" -}}
{{- include "dra-driver-gpu.fullname" . -}}-mps-agent
{{- end -}}

{{- define "dra-driver-gpu.controller" -}}
{{- include "dra-driver-gpu.fullname" . -}}-controller
{{- end -}}

{{- define "dra-driver-gpu.controller.selector" -}}
{{ include "dra-driver-gpu.selector" . }}
app.kubernetes.io/component: controller
{{- end -}}

{{/* The user that the controller is to the API server; the admission policy matches it. */}}
{{- define "dra-driver-gpu.controller.user" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ include "dra-driver-gpu.controller" . }}
{{- end -}}

{{- define "dra-driver-gpu.uninstall" -}}
{{- include "dra-driver-gpu.fullname" . -}}-uninstall
{{- end -}}

{{/* Of the objects that `helm uninstall` makes for its check and removes again. */}}
{{- define "dra-driver-gpu.uninstall.hook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: "-1"
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
{{- end -}}

{{- define "dra-driver-gpu.profiles" -}}
{{- .Values.existingProfilesConfigMap | default (printf "%s-profiles" (include "dra-driver-gpu.fullname" .)) -}}
{{- end -}}

{{/* The user that the DaemonSet's pods are to the API server; the admission policy matches it. */}}
{{- define "dra-driver-gpu.kubelet-plugin.user" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ include "dra-driver-gpu.kubelet-plugin.account" . }}
{{- end -}}

{{- define "dra-driver-gpu.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "dra-driver-gpu.kubelet-plugin.selector" -}}
{{ include "dra-driver-gpu.selector" . }}
app.kubernetes.io/component: kubelet-plugin
{{- end -}}

{{- define "dra-driver-gpu.mps-agent.selector" -}}
{{ include "dra-driver-gpu.selector" . }}
app.kubernetes.io/component: mps-agent
{{- end -}}

{{- define "dra-driver-gpu.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "dra-driver-gpu.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/*
"true" where there is no cluster to ask, as with `helm template`: Helm knows no kinds then, not even Pod. It takes all groups
that it was built with for served, and an older Helm does not know newer ones: the Kubernetes version tells.
*/}}
{{- define "dra-driver-gpu.offline" -}}
{{- if not (.Capabilities.APIVersions.Has "v1/Pod") -}}
true
{{- end -}}
{{- end -}}

{{/*
The newest version of resource.k8s.io that the cluster serves, or nothing: before 1.34 Dynamic Resource Allocation is off by
default, and before 1.32 there is none that this driver knows. GPUs are then given out by the device-plugin API only.
*/}}
{{- define "dra-driver-gpu.resource-api" -}}
{{- $kube := .Capabilities.KubeVersion.Version -}}
{{- $served := .Capabilities.APIVersions -}}
{{- $offline := include "dra-driver-gpu.offline" . -}}
{{- if and (or $offline ($served.Has "resource.k8s.io/v1")) (semverCompare ">=1.34.0-0" $kube) -}}
resource.k8s.io/v1
{{- else if and ($served.Has "resource.k8s.io/v1beta2") (semverCompare ">=1.33.0-0" $kube) -}}
resource.k8s.io/v1beta2
{{- else if and ($served.Has "resource.k8s.io/v1beta1") (semverCompare ">=1.32.0-0" $kube) -}}
resource.k8s.io/v1beta1
{{- end -}}
{{- end -}}

{{/* "true" where the cluster has validating admission policies: from 1.30 on. Before, RBAC alone limits the accounts. */}}
{{- define "dra-driver-gpu.admission-policies" -}}
{{- $expected := and (include "dra-driver-gpu.offline" .) (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version) -}}
{{- if or $expected (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy") -}}
true
{{- end -}}
{{- end -}}

{{/*
"true" where the old pod may serve until the new one does: from kubelet 1.33 on. An older one deregisters the driver
when the old pod's socket goes.
*/}}
{{- define "dra-driver-gpu.surge" -}}
{{- if semverCompare ">=1.33.0-0" .Capabilities.KubeVersion.Version -}}
true
{{- end -}}
{{- end -}}

{{/*
"true" where the class of claims with adminAccess is rewritten: wanted, and the cluster has mutating admission policies
(on by default from 1.36 on, as is what gives out GPUs in fractions).
*/}}
{{- define "dra-driver-gpu.rewrites-admin-access" -}}
{{- $served := .Capabilities.APIVersions -}}
{{- $expected := and (include "dra-driver-gpu.offline" .) (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) -}}
{{- if and .Values.rewriteAdminAccess (not .Values.besideOtherDriver) (or $expected ($served.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy")) -}}
true
{{- end -}}
{{- end -}}

{{/*
"true" where this release has the controller, and with it the NodeProfiles: their CRD belongs to one release in a cluster.
It stays after `helm uninstall`, and belongs to the release of that name and namespace still. One that belongs to no release
becomes this one's with `--take-ownership`; without it, Helm refuses.
*/}}
{{- define "dra-driver-gpu.node-profiles" -}}
{{- if .Values.controller.enabled -}}
{{- $crd := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "nodeprofiles.resource.nvidia.com" | default dict -}}
{{- $release := dig "metadata" "annotations" "meta.helm.sh/release-name" "" $crd -}}
{{- $space := dig "metadata" "annotations" "meta.helm.sh/release-namespace" "" $crd -}}
{{- if or (not $release) (and (eq $release .Release.Name) (eq $space .Release.Namespace)) -}}
true
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Takes the rules in CEL out of a schema, wherever they stand. Before 1.30 the API server lacks functions that they use, and would
refuse the CRD. The plugin and the controller refuse the same, only later.
*/}}
{{- define "dra-driver-gpu.without-rules" -}}
{{- if kindIs "map" . -}}
{{- $_ := unset . "x-kubernetes-validations" -}}
{{- range $key, $value := . -}}{{- include "dra-driver-gpu.without-rules" $value -}}{{- end -}}
{{- else if kindIs "slice" . -}}
{{- range . -}}{{- include "dra-driver-gpu.without-rules" . -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* A profile of MIG as a label of DNS. "-me" is spelled "-no-me", or it would be called as "+me" is. */}}
{{- define "dra-driver-gpu.mig-profile.label" -}}
{{- . | replace "-" "-no-" | replace "+" "-" | replace "." "-" -}}
{{- end -}}

{{/* A profile of MIG in the name of a resource, as NVIDIA's device plugin spells it. */}}
{{- define "dra-driver-gpu.mig-profile.resource" -}}
{{- . | replace "+" "." -}}
{{- end -}}

{{/* CEL: whether a device is a MIG partition. */}}
{{- define "dra-driver-gpu.is-partition" -}}
device.driver == '{{ .Values.driverName }}' &&
device.attributes['{{ .Values.driverName }}'].type == 'mig'
{{- end -}}

{{/* Where the pods of both DaemonSets run, and what they are there: the same nodes, so that each plugin has its agent. */}}
{{- define "dra-driver-gpu.placement" -}}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if .Values.hostNetwork }}
hostNetwork: true
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
nodeSelector:
  {{- merge (dict "kubernetes.io/os" "linux") (.Values.nodeSelector | default dict) | toYaml | nindent 2 }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.onlyLabelledNodes }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        # Node Feature Discovery: a PCI device of NVIDIA (10de); 0300 and 0302 are display controllers.
        - matchExpressions:
            - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
        - matchExpressions:
            - {key: feature.node.kubernetes.io/pci-0300_10de.present, operator: In, values: ["true"]}
        - matchExpressions:
            - {key: feature.node.kubernetes.io/pci-0302_10de.present, operator: In, values: ["true"]}
        # GPU Feature Discovery, the GPU operator, or a person.
        - matchExpressions:
            - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
What the plugin sees of the node below /host, as JSON: all of it, or what every Linux has and what the values name besides.
A directory that a node may lack cannot be mounted: the pod would not start there, or the runtime would create it.
*/}}
{{- define "dra-driver-gpu.host-directories" -}}
{{- $seen := list "/" -}}
{{- if not .Values.mountHostRoot -}}
{{- $seen = list "/dev" "/etc" "/proc" "/run" "/sys" "/usr" -}}
{{- $hookDirectory := "" -}}
{{- with .Values.nvidiaCdiHook -}}{{- $hookDirectory = dir . -}}{{- end -}}
{{- range list .Values.driverRoot .Values.runtimeDir $hookDirectory -}}
{{- $directory := clean . | trimSuffix "/" -}}
{{- $isSeen := has $directory (list "" ".") -}}
{{- range $seen -}}
{{- if or (eq . $directory) (hasPrefix (printf "%s/" .) $directory) -}}{{- $isSeen = true -}}{{- end -}}
{{- end -}}
{{- if not $isSeen -}}{{- $seen = append $seen $directory -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $seen -}}
{{- end -}}
